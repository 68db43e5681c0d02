"""What is asked of a run while it goes on, as something a selector can wait for."""

from __future__ import annotations

import signal
import socket
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from shoal.comm.words import ScaleAnswered
from shoal.errors import CommTimeout, SpecError
from shoal.launch.messages import Interrupt, ScaleRequest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANSWER_TIMEOUT_S = 60.0


class Requests:
    """What signals and other threads ask of the thread that supervises a run, until its block ends.

    In the block Ctrl-C and SIGTERM ask for the end, in place of what they would do. Only the main thread may say
    what signals do: elsewhere they are left alone, and threads ask.
    """

    def __init__(self) -> None:
        self._asked: deque[Interrupt | ScaleRequest] = deque()
        self._answers: dict[int, Future[ScaleAnswered]] = {}
        self._numbers = count(-1, -1)
        """Below 0, so that they are not those of requests from other processes."""
        self._open = threading.Lock()
        """Held by whoever asks, so that nobody does when it is too late."""
        self._is_over = False
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            self._before = {signum: signal.signal(signum, self._note_signal) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
        self.close()

    def close(self) -> None:
        """From here on nobody is heard; whoever waits for an answer is told so."""
        with self._open:
            self._is_over = True
        self._wake.close()
        self._woken.close()
        while self._answers:
            self._answers.popitem()[1].set_exception(not_running("This run"))

    # For those who ask.

    def interrupt(self) -> None:
        """Ask the run to end after its step; the second time, at once. Nothing where it is over."""
        with self._open:
            if not self._is_over:
                self._ask(Interrupt())

    def scale(self, workers: int | None, servers: int | None, hosts: str | None = None) -> ScaleAnswered:
        """Ask for so many workers and servers, or hosts, or how many there are, and wait for the answer."""
        answer: Future[ScaleAnswered] = Future()
        with self._open:
            if self._is_over:
                raise not_running("This run")
            number = next(self._numbers)
            self._answers[number] = answer
            self._ask(ScaleRequest(number=number, workers=workers, servers=servers, hosts=hosts))
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise CommTimeout(f"The run has not answered within {ANSWER_TIMEOUT_S:.0f} s.") from None

    # For the thread that supervises.

    def fileno(self) -> int:
        """Readable when something was asked, until it is taken."""
        return self._woken.fileno()

    def take(self) -> list[Interrupt | ScaleRequest]:
        """What has been asked since the last call."""
        with suppress(BlockingIOError):
            while self._woken.recv(64):
                pass
        return [self._asked.popleft() for _ in range(len(self._asked))]

    @property
    def wants_end(self) -> bool:
        """Whether somebody has asked for the end, and that was not taken."""
        return any(isinstance(one, Interrupt) for one in list(self._asked))

    def reply(self, number: int, answer: ScaleAnswered) -> None:
        """Answer a request for other numbers."""
        self._answers.pop(number).set_result(answer)

    def _ask(self, request: Interrupt | ScaleRequest) -> None:
        self._asked.append(request)
        with suppress(BlockingIOError):  # Where so much is unread, it is readable.
            self._wake.send(b"\0")

    def _note_signal(self, *_: object) -> None:
        # No lock, and nobody to wake: this interrupts whatever the main thread does, and Python has woken it.
        self._asked.append(Interrupt())


def not_running(run: str) -> SpecError:
    """What to say to those who would change the size of a run that is over."""
    return SpecError(f"{run} is not running; only a run that is going on can be scaled.")
