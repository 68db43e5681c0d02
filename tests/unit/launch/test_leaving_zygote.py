"""A zygote whose owner is killed hears of it twice, and ends without a word."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from shoal.launch.zygote import serve_until_told


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Told:
    """Serves until it is told to end."""

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve


@pytest.mark.parametrize(
    "told", [lambda: None, lambda: os.kill(os.getpid(), signal.SIGTERM)], ids=["lifeline", "signal"]
)
def test_who_leaves_is_not_told_again(told: Callable[[], None]) -> None:
    assert serve_until_told(Told(told)) is None  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
