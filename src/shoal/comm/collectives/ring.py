"""Ring all-reduce: each rank sends 2 (n - 1) / n of the tensor, however many ranks there are."""

from __future__ import annotations

from typing import ClassVar

from shoal.comm.collectives.base import LOOKAHEAD, Collective
from shoal.comm.collectives.exchange import Exchange


class Ring(Collective):
    """Reduce-scatter, then all-gather, around a ring.

    The tensor is cut into a segment per rank. In the first n - 1 steps partial sums travel, and every rank
    adds its own, so that a segment is complete when it has been everywhere; in the next n - 1 steps the
    complete segments travel. What a rank sends in a step is what it received in the step before.
    """

    name: ClassVar[str] = "ring"

    def _allreduce(self, exchange: Exchange) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        bounds = [exchange.numel * index // self.size for index in range(self.size + 1)]
        # The longest segment decides for all: a chunk must find its match in every other segment.
        count = exchange.num_chunks(-(-exchange.numel // self.size))
        segments = [exchange.chunks(bounds[index], bounds[index + 1], count=count) for index in range(self.size)]
        num_steps = 2 * (self.size - 1)
        outgoing = [chunk for step in range(num_steps) for chunk in segments[(self.rank - step) % self.size]]
        incoming = [chunk for step in range(num_steps) for chunk in segments[(left - step) % self.size]]

        # Item i of `outgoing` is item i - count of `incoming`, so this far ahead everything is known.
        ahead = min(count, LOOKAHEAD)
        for chunk in outgoing[:ahead]:
            exchange.send(right, chunk)
        for index, chunk in enumerate(incoming):
            content = exchange.take(left, chunk)
            if index < len(incoming) // 2:
                exchange.view(chunk).add_(content)
            else:
                exchange.view(chunk).copy_(content)
            if index + ahead < len(outgoing):
                exchange.send(right, outgoing[index + ahead])
