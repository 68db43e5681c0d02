"""What a process is doing: noted by whoever works, read by the thread that beats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.spec.vocabulary import State

WORKING = (State.TRAINING, State.SERVING)
"""States in which a process is expected to move all the time."""
_LAPS = 100
_FEWEST_LAPS = 5
"""So many steps must have been measured before anybody may judge by them."""
_LOOKS_UP_S = 0.5
"""Whoever waits looks up more often than this."""


class Pulse:
    """Signs that a process moves, and how long it usually goes without one.

    The main thread shows signs: at the end of every step, and again and again while it waits for others. Each
    costs less than a microsecond. What is measured is what a hang is judged by: the time between two signs.
    """

    def __init__(self, state: State = State.STARTING, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = 0
        self._clock = clock
        self._state = state
        self._waits = self._blocks = False
        self._signs = 0
        self._last_sign = clock()
        self._longest = 0.0
        self._laps: deque[float] = deque(maxlen=_LAPS)
        """Of the latest steps: the longest time without a sign."""
        self._read_at = clock()
        self._seen_signs = 0
        self._still_s = 0.0
        self._gap_s = 0.0

    # For whoever works.

    def enter(self, state: State) -> None:
        """Something else begins: an evaluation, say. What came before says nothing about it."""
        self._state = state
        self.sign()
        self._longest = 0.0

    @contextmanager
    def during(self, state: State) -> Iterator[None]:
        """The block is something else: it waits for a disk, say, and nobody can tell how long that takes."""
        before = self._state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def interlude(self, state: State) -> Iterator[None]:
        """The block is something else, in the middle of a step: what was measured of that still counts."""
        self.sign()
        before, longest = self._state, self._longest
        self._state = state
        try:
            yield
        finally:
            self.sign()
            self._state, self._longest = before, longest

    def lap(self, step: int) -> None:
        """A step is done."""
        self.sign()
        self.step = step
        self._laps.append(self._longest)
        self._longest = 0.0

    def sign(self) -> None:
        """The main thread moves."""
        now = self._clock()
        self._longest = max(self._longest, now - self._last_sign)
        self._last_sign = now
        self._waits = self._blocks = False
        self._signs += 1

    def idle(self) -> None:
        """The main thread waits for others, and looks up now and then."""
        self.sign()
        self._waits = True

    def block(self) -> None:
        """The main thread is about to wait for others in a call that cannot look up."""
        self.sign()
        self._blocks = True

    # For the thread that beats.

    def read(self, interval_s: float) -> dict[str, Any]:
        """Where the process stands, for a reader that should come every `interval_s`.

        Time in which the reader itself was kept from running is not held against the main thread, which shared
        its fate; it is told as `gap`, the longest so far.
        """
        now = self._clock()
        since_s, self._read_at = now - self._read_at, now
        is_measured = self._state in WORKING and len(self._laps) >= _FEWEST_LAPS
        if is_measured:
            self._gap_s = max(self._gap_s, since_s - interval_s)
        if self._signs != self._seen_signs:
            self._seen_signs, self._still_s = self._signs, 0.0
        else:
            self._still_s += min(since_s, 2 * interval_s)
        found = {"step": self.step, "phase": self._phase, "still": self._still_s}
        return {**found, "p99": p99(self._laps), "gap": self._gap_s} if is_measured else found

    @property
    def _phase(self) -> State:
        if self._state != State.TRAINING:
            return self._state
        # Who waited and does not look up any more has gone on, and got stuck.
        waits = self._blocks or (self._waits and self._still_s < _LOOKS_UP_S)
        return State.WAITING if waits else State.COMPUTING


def p99(values: deque[float]) -> float:
    """What 99 of 100 values do not exceed."""
    ordered = sorted(values)
    return ordered[-1 - len(ordered) // 100]
