"""Virtual time: what happens when."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

Action = Callable[[], None]


class Timeline:
    """Actions in the order of their times; those of one time in the order in which they were planned."""

    def __init__(self, dice: random.Random) -> None:
        self.now = 0.0
        self.dice = dice
        self._order = itertools.count()
        self._planned: list[tuple[float, int, Action]] = []

    def after(self, seconds: float, action: Action) -> None:
        """Let something happen then."""
        heapq.heappush(self._planned, (self.now + seconds, next(self._order), action))

    def step(self) -> None:
        """Let the next thing happen."""
        at, _, action = heapq.heappop(self._planned)
        self.now = max(self.now, at)
        action()


class Alarm:
    """Calls again and again, each time at the moment that `next_at` names then."""

    def __init__(self, timeline: Timeline, next_at: Callable[[], float | None], ring: Action) -> None:
        self._timeline = timeline
        self._next_at = next_at
        self._ring = ring
        self._set_for = float("inf")

    def set(self) -> None:
        """The moment may have changed."""
        at = self._next_at()
        if at is not None and at < self._set_for:
            self._set_for = at
            self._timeline.after(max(0.0, at - self._timeline.now), lambda: self._wake(at))

    def _wake(self, at: float) -> None:
        if at > self._set_for:
            return  # It has been set for an earlier moment since, and rang then.
        self._set_for = float("inf")
        due = self._next_at()
        if due is not None and due <= self._timeline.now:
            self._ring()
        self.set()
