"""What is asked of a run by signals and by other threads reaches the thread that supervises it."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.comm.words import ScaleAnswered
from shoal.errors import CommTimeout, SpecError
from shoal.launch import requests as module
from shoal.launch.messages import Interrupt, ScaleRequest
from shoal.launch.requests import Requests

GUARD_S = 30.0


def wait_for(requests: Requests) -> list[Any]:
    """What the supervising thread would find when it wakes."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        assert selector.select(GUARD_S), "nobody has woken it"
    return requests.take()


def in_thread(act: Callable[[], Any]) -> Any:
    """What a thread that is not the main one makes of it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result(GUARD_S)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_for_the_end_while_the_block_runs(signum: int) -> None:
    before = signal.getsignal(signum)
    with Requests() as requests:
        os.kill(os.getpid(), signum)
        assert wait_for(requests) == [Interrupt()]
        assert requests.take() == []
        os.kill(os.getpid(), signum)
        assert requests.wants_end and requests.take() == [Interrupt()] and not requests.wants_end
    assert signal.getsignal(signum) is before


def test_a_thread_that_is_not_the_main_one_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)

    def supervise() -> list[Any]:
        with Requests() as requests:
            assert signal.getsignal(signal.SIGINT) is before
            threading.Thread(target=requests.interrupt).start()
            return wait_for(requests)

    assert in_thread(supervise) == [Interrupt()]


def test_a_thread_that_asks_for_another_size_waits_for_the_answer() -> None:
    with Requests() as requests, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(requests.scale, 3, None)
        (request,) = wait_for(requests)
        assert request == ScaleRequest(number=request.number, workers=3) and request.number < 0
        assert not requests.wants_end
        requests.reply(request.number, ScaleAnswered(text="Three it is."))
        assert asking.result(GUARD_S).text == "Three it is."


def test_when_it_is_over_nobody_waits_and_nobody_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        with Requests() as requests:
            asking = pool.submit(requests.scale, 3, None)
            wait_for(requests)
        with pytest.raises(SpecError, match="is not running"):
            asking.result(GUARD_S)
    requests.interrupt()
    with pytest.raises(SpecError, match="is not running; only a run that is going on can be scaled"):
        requests.scale(2, None)


def test_who_is_not_answered_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)
    with Requests() as requests, pytest.raises(CommTimeout, match="has not answered"):
        requests.scale(None, None)


def test_many_requests_wake_it_once() -> None:
    with Requests() as requests:
        for _ in range(100_000):
            requests.interrupt()
        assert len(wait_for(requests)) == 100_000
        with selectors.DefaultSelector() as selector:
            selector.register(requests, selectors.EVENT_READ)
            assert not selector.select(0), "all of it was taken"
