"""What losses do to a tcp connection: how much of it may be on its way, and when a lost packet arrives after all.

As Linux does it, with Reno's window: a loss halves it, and while it is what holds the sender up it grows by a
packet in each round trip. A packet that others follow is missed a round trip later; the last one only when a timer
ends.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from shoal.spec.link import NetworkLink

_FIRST_PACKETS, _FEWEST_PACKETS = 10.0, 2.0
_LEAST_TIMEOUT_S = 0.2
"""What tcp waits at least, beyond a round trip, for news of a packet that nothing follows."""


class Window:
    """Of one connection over a link that loses packets."""

    def __init__(self, link: NetworkLink, chance: np.random.Generator) -> None:
        self._link, self._chance = link, chance
        self._packets, self._threshold = _FIRST_PACKETS, math.inf
        self._flying: deque[tuple[float, int]] = deque()
        """Packets that are on their way, and when it is known that they have arrived."""
        self._count = 0
        """Of all of these."""

    def opens_at(self, count: int, now: float) -> float:
        """When so many packets may leave: now, or when enough others have arrived."""
        self._hear(now)
        left = self._count
        for known_at, packets in self._flying:
            if left + count <= self._packets:
                return now
            left -= packets
            now = max(now, known_at)
        return now

    def let_out(self, count: int, arrives_at: float, *, is_last: bool) -> float:
        """So many packets leave, which would arrive then; when all of them have. `is_last`: nothing follows."""
        late_s = self._lateness(count, is_last=is_last)
        if late_s:
            self._packets = self._threshold = max(_FEWEST_PACKETS, self._packets / 2)
        self._flying.append((arrives_at + late_s + self._link.latency, count))
        self._count += count
        return arrives_at + late_s

    def _lateness(self, count: int, *, is_last: bool) -> float:
        """How much later the last of so many packets is there because some had to be sent again."""
        rounds, missing = 0, self._lost(count)
        if is_last and count and self._chance.random() < self._link.loss:
            wait_s = self._link.round_trip_s + _LEAST_TIMEOUT_S
            while self._chance.random() < self._link.loss:  # each wait is twice as long as the one before
                wait_s = 2 * wait_s + self._link.round_trip_s
            return wait_s
        while missing:
            rounds, missing = rounds + 1, self._lost(missing)
        return rounds * self._link.round_trip_s

    def _lost(self, count: int) -> int:
        return int(self._chance.binomial(count, self._link.loss))

    def _hear(self, now: float) -> None:
        """Of what has arrived. A window that holds nobody up does not grow."""
        while self._flying and self._flying[0][0] <= now:
            is_full = self._count >= self._packets / 2
            _, packets = self._flying.popleft()
            self._count -= packets
            if is_full:
                slow = self._packets >= self._threshold
                self._packets += packets / self._packets if slow else packets
