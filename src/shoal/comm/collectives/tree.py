"""Tree all-reduce: sums climb a binary tree and totals come down; few hops, for small tensors.

Central all-reduce is a tree of one level: everything to rank 0, which is the bottleneck, and back.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.comm.collectives.base import LOOKAHEAD, Collective, binary_children
from shoal.comm.collectives.exchange import Chunk, Exchange


class Tree(Collective):
    """Each rank adds its children's chunks to its own and passes the sum up; the top sends the total down."""

    name: ClassVar[str] = "tree"

    @property
    def parent(self) -> int:
        """The rank above this one; the top has none."""
        return (self.rank - 1) // 2

    @property
    def children(self) -> list[int]:
        """The ranks below this one, in the order their sums are added."""
        return binary_children(self.rank, self.size)

    def _allreduce(self, exchange: Exchange) -> None:
        # Chunks go up a few ahead of those that come down, so that both directions are busy.
        chunks = exchange.chunks(0, exchange.numel)
        for index in range(len(chunks) + LOOKAHEAD):
            if index < len(chunks):
                self._pass_up(exchange, chunks[index])
            if 0 <= index - LOOKAHEAD < len(chunks):
                self._pass_down(exchange, chunks[index - LOOKAHEAD])

    def _pass_up(self, exchange: Exchange, chunk: Chunk) -> None:
        for child in self.children:
            exchange.view(chunk).add_(exchange.take(child, chunk))
        if self.rank != 0:
            exchange.send(self.parent, chunk)

    def _pass_down(self, exchange: Exchange, chunk: Chunk) -> None:
        if self.rank != 0:
            exchange.view(chunk).copy_(exchange.take(self.parent, chunk))
        for child in self.children:
            exchange.send(child, chunk)


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
