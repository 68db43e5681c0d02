"""Who has come to which round, and who has left: counters in memory that all see, where the group has such."""

from __future__ import annotations

from shoal.arena import Counters, counter_bytes
from shoal.comm.group import Group


class Roll:
    """One process's entry, and a look at the others'."""

    def __init__(self, group: Group) -> None:
        self._index, self._ranks = group.index, group.ranks
        size = group.size
        self._come, self._left = range(size), range(size, 2 * size)
        segment = group.share({"roll": counter_bytes(2 * size)})
        self._counters: Counters | None = None if segment is None else segment.counters("roll")

    def enter(self, number: int) -> None:
        """This process takes part in this round."""
        if self._counters is not None:
            self._counters[self._come[self._index]] = number

    def leave(self, *, is_aborted: bool) -> None:
        """It takes part in none that it has not entered, nor, where it is aborted, in the one that it is in."""
        if self._counters is not None:
            if is_aborted:
                self._counters[self._come[self._index]] = 0
            self._counters[self._left[self._index]] = 1

    def missing(self, number: int) -> tuple[int, ...]:
        """Ranks of those who have not come to this round."""
        if self._counters is None:
            return ()
        return tuple(rank for rank, at in zip(self._ranks, self._come, strict=True) if self._counters[at] < number)

    def gone(self, number: int) -> tuple[int, ...]:
        """Ranks of those who will never come to this round."""
        if self._counters is None:
            return ()
        # First who has left: whoever has, enters nothing any more.
        left = [rank for rank, at in zip(self._ranks, self._left, strict=True) if self._counters[at]]
        return tuple(rank for rank in self.missing(number) if rank in left)
