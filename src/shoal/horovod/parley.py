"""How processes meet, again and again: each says something, and hears what all say.

Who waits in a round, or for what was agreed on there, can see who has not come to it, and who never will.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.arena import Counters, counter_bytes
from shoal.comm.group import Group

_ROW_BYTES = 1024
_LENGTH_BYTES = 8


class Parley(Protocol):
    """One process's part in those of a process set."""

    def meet(self, text: str) -> list[str]:
        """Come to the next round; what everybody says there, by index."""

    def leave(self, *, is_aborted: bool) -> None:
        """Come to no more. Where it is aborted, others cannot count on this process in the round that it is in."""

    def missing(self) -> tuple[int, ...]:
        """Ranks of those who have not come to this process's round."""

    def gone(self) -> tuple[int, ...]:
        """Ranks of those who will never come to it, or have left it."""


class GroupParley:
    """Over a group's own collectives. Where all share memory, counters there say who has come and left."""

    def __init__(self, group: Group) -> None:
        self._group, self._number = group, 0
        size = group.size
        self._come, self._left = range(size), range(size, 2 * size)
        segment = group.share({"roll": counter_bytes(2 * size)})
        self._counters: Counters | None = None if segment is None else segment.counters("roll")

    def meet(self, text: str) -> list[str]:
        self._number += 1
        if self._counters is not None:
            self._counters[self._come[self._group.index]] = self._number
        return _exchange(text, self._group)

    def leave(self, *, is_aborted: bool) -> None:
        if self._counters is not None:
            if is_aborted:
                self._counters[self._come[self._group.index]] = 0
            self._counters[self._left[self._group.index]] = 1

    def missing(self) -> tuple[int, ...]:
        if self._counters is None:
            return ()
        pairs = zip(self._group.ranks, self._come, strict=True)
        return tuple(rank for rank, at in pairs if self._counters[at] < self._number)

    def gone(self) -> tuple[int, ...]:
        if self._counters is None:
            return ()
        # First who has left: whoever has, enters nothing any more.
        pairs = zip(self._group.ranks, self._left, strict=True)
        left = [rank for rank, at in pairs if self._counters[at]]
        return tuple(rank for rank in self.missing() if rank in left)


def _exchange(text: str, group: Group) -> list[str]:
    """What everybody says, by index. One wait where all are short."""
    content = text.encode()
    first = len(content).to_bytes(_LENGTH_BYTES, "little") + content[: _ROW_BYTES - _LENGTH_BYTES]
    rows = [bytes(row.numpy()) for row in group.all_gather(_padded(first, _ROW_BYTES))]
    lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
    if (longest := max(lengths)) <= _ROW_BYTES - _LENGTH_BYTES:
        found = [row[_LENGTH_BYTES:] for row in rows]
    else:
        found = [bytes(row.numpy()) for row in group.all_gather(_padded(content, longest))]
    return [row[:length].decode() for row, length in zip(found, lengths, strict=True)]


def _padded(content: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
