"""Central all-reduce: everything to rank 0, summed in rank order, and back. Rank 0 is the bottleneck."""

from __future__ import annotations

from typing import ClassVar

from shoal.comm.collectives.tree import Tree


class Central(Tree):
    """A tree of one level: rank 0 at the top, all others right below it."""

    name: ClassVar[str] = "central"

    @property
    def parent(self) -> int:
        """Rank 0."""
        return 0

    @property
    def children(self) -> list[int]:
        """Everyone else, in rank order, for rank 0; nobody for the others."""
        return list(range(1, self.size)) if self.rank == 0 else []
