"""All-gather all-reduce: everybody gets everybody's tensor and sums. One hop, n - 1 times the bytes."""

from __future__ import annotations

from typing import ClassVar

import torch

from shoal.comm.collectives.base import LOOKAHEAD, Collective
from shoal.comm.collectives.exchange import Chunk, Exchange


class AllGather(Collective):
    """Each rank sends its chunks to all others and adds up all contributions in rank order."""

    name: ClassVar[str] = "allgather"

    def _allreduce(self, exchange: Exchange) -> None:
        chunks = exchange.chunks(0, exchange.numel)
        own: dict[int, torch.Tensor] = {}
        for index in range(len(chunks) + LOOKAHEAD):
            if index < len(chunks):
                own[index] = self._scatter(exchange, chunks[index])
            if 0 <= (done := index - LOOKAHEAD) < len(chunks):
                self._sum(exchange, chunks[done], own.pop(done))

    def _scatter(self, exchange: Exchange, chunk: Chunk) -> torch.Tensor:
        # A copy: the sum takes this chunk's place while slower peers may not have it yet.
        own = exchange.view(chunk).clone()
        for peer in self._others():
            exchange.send(peer, chunk, own)
        return own

    def _sum(self, exchange: Exchange, chunk: Chunk, own: torch.Tensor) -> None:
        contributions = {peer: exchange.take(peer, chunk) for peer in self._others()} | {self.rank: own}
        total = exchange.view(chunk).copy_(contributions[0])
        for rank in range(1, self.size):
            total.add_(contributions[rank])

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
