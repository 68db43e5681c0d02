"""Marks by which whoever reads a shard's values in shared memory sees that they changed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.strategies.ps.memory import ServedMemory


class BlockVersions:
    """A number for each of a shard's blocks. Who sees an odd one, or another one afterwards, reads again."""

    def __init__(self, memory: ServedMemory, shard: int, copy: int) -> None:
        self._words = memory.versions(copy)
        self._numbers = [block.number for block in memory.blocks[shard]]

    def settle(self) -> None:
        """Nothing changes now: whoever held this copy before may have been killed in the middle of a block."""
        for number in self._numbers:
            self._words[number] += self._words[number] & 1

    def leave_open(self, block: int) -> None:
        """Let nobody read a block until it has changed."""
        self._words[self._numbers[block]] |= 1

    @contextmanager
    def changing(self, block: int) -> Iterator[None]:
        """One of the blocks changes."""
        number = self._numbers[block]
        self._words[number] |= 1
        yield
        self._words[number] += 1

    @contextmanager
    def all_changing(self) -> Iterator[None]:
        """All of the blocks change."""
        for number in self._numbers:
            self._words[number] |= 1
        yield
        for number in self._numbers:
            self._words[number] += 1
