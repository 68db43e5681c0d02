"""How processes come together: all of them, and those of a process set. One host shares memory for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.comm.group import Group
from shoal.horovod.parley import GroupParley, Parley

Circle = tuple[Group, Parley]
"""Where processes compute together, and where they agree on what."""


class Assembly(Protocol):
    """One process's part in it."""

    def all(self) -> Circle:
        """Of all processes."""

    def part(self, ranks: Sequence[int]) -> Circle | None:
        """Of these; None in others, who call this, too: in the thread that takes part in the parley of all."""

    def close(self) -> None:
        """Leave all of them; nobody computes any more."""


class HostAssembly:
    """In one group, which can be split."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all(self) -> Circle:
        return self._group, GroupParley(self._group)

    def part(self, ranks: Sequence[int]) -> Circle | None:
        others = [rank for rank in self._group.ranks if rank not in ranks]
        part = self._group.split([list(ranks), others])
        return (part, GroupParley(part)) if self._group.ranks[self._group.index] in ranks else None

    def close(self) -> None:
        self._group.close()
