"""Whether processes that share a GPU compute one after the other.

A GPU that is busy all the time loses by two at once: it goes to and fro between them, and each has its own part of
the caches. One that waits for its hosts, because a pass is many short kernels, gains. Bits do not depend on it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_FIRST, _LAST = 3, 8
"""The steps of a process that are looked at: what comes before them is made ready, compiled or chosen."""
_BUSY = 0.15
"""Of the time of a pass: so much of it a host waits, at the end of it, for a GPU that has been busy throughout."""
_LEAD_S = 1.5e-3
"""So long it takes a process to wake up and ask for enough to keep a GPU busy."""
_RECENT = 3
"""Steps by which the next one is judged."""


class GpuTurns:
    """Decided once, from this process's own passes, each of which had the GPU to itself."""

    def __init__(self) -> None:
        self.are_taken = True
        self._shares: list[float] = []
        self._waits: deque[float] = deque(maxlen=_RECENT)

    def note(self, asking_s: float, waiting_s: float) -> None:
        """So long it took to ask for a step's passes, and then to wait for them."""
        self._waits.append(waiting_s)
        if len(self._shares) >= _LAST:
            return
        self._shares.append(waiting_s / (asking_s + waiting_s))
        if len(self._shares) == _LAST:
            self.are_taken = median(self._shares[_FIRST:]) > _BUSY

    @property
    def soon_s(self) -> float:
        """How long to wait for passes that were asked for before the next process begins to ask for its own, so
        that the GPU has them when these are done."""
        return max(0.0, min(self._waits) - _LEAD_S) if len(self._waits) == _RECENT else math.inf
