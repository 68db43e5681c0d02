"""Rounds in which processes leave something in shared memory for the others to read.

Each process has two buffers, used in turns: it fills the next while others still take the last. A buffer is filled
again once everybody has left the round before the last, so nobody needs a lock, and a death leaves nothing to
repair. Like all counters in shared memory, these rely on the store order of x86-64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.arena import Counters, Segment
from shoal.comm.group.regions import BUFFER_BYTES, GroupMarks, buffers_of

Act = Callable[[int, int], None]
"""Does something in a round: its number in this operation, and its number in the group's life."""


class Staging:
    """One process's part in all rounds of its group."""

    def __init__(self, segment: Segment, counters: Counters, index: int, size: int) -> None:
        self._segment = segment
        self._counters = counters
        self._marks = GroupMarks(size)
        self._index = index
        self._size = size
        self._round = 0
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}

    def run(self, count: int, fill: Act | None, take: Act) -> None:
        """So many rounds. `fill`: fill this process's buffer; None where it has nothing to say. `take` waits for
        those whose buffers it reads. The next buffer is filled before the last round is taken, so that others need
        not wait for the copy."""
        first, last = self._round + 1, self._round + count
        self._round = last
        for number in range(first, last + 2):
            if fill is not None and number <= last:
                self._counters.wait_all(self._marks.left, number - 2)
                fill(number - first, number)
                self._counters.publish(self._marks.posted[self._index], number)
            if number > first:
                take(number - 1 - first, number - 1)
                self._counters.publish(self._marks.left[self._index], number - 1)

    def wait_for(self, index: int, number: int) -> None:
        """Until this process has filled its buffer of this round."""
        self._counters.wait(self._marks.posted[index], number)

    def wait_for_all(self, number: int) -> None:
        """Until all have filled theirs."""
        self._counters.wait_all(self._marks.posted, number)

    def tell_folded(self, number: int) -> None:
        """This process's share of the result is in its buffer."""
        self._counters.publish(self._marks.folded[self._index], number)

    def wait_folded(self, index: int, number: int) -> None:
        """Until that process's share is."""
        self._counters.wait(self._marks.folded[index], number)

    def room(self, dtype: torch.dtype) -> int:
        """Elements that a buffer holds."""
        return BUFFER_BYTES // dtype.itemsize

    def buffer(self, index: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer of a process in a round."""
        if dtype not in self._buffers:
            self._buffers[dtype] = [
                half
                for owner in range(self._size)
                for half in self._segment.tensor(buffers_of(owner), dtype).split(self.room(dtype))
            ]
        return self._buffers[dtype][2 * index + number % 2]

    def buffers(self, number: int, dtype: torch.dtype, part: slice) -> list[torch.Tensor]:
        """The same part of everybody's, by index."""
        return [self.buffer(index, number, dtype)[part] for index in range(self._size)]
