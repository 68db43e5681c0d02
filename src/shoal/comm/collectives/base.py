"""The contract of all collectives, and what they share: checks, numbering, failure and the broadcast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from shoal.comm.collectives.exchange import Exchange, Mailbox
from shoal.comm.transport import Transport
from shoal.errors import CommError, ProtocolError, SpecError

LOOKAHEAD = 8
"""Chunks that may be under way before their answer: the wire stays busy, and memory small."""


class Collective(ABC):
    """Operations in which all ranks take part, each calling the same ones in the same order.

    A collective owns its transport: nothing else may receive from it. Every sum is computed once or in one
    order, so all ranks end with the same bits. A tensor is the caller's again when the call returns.
    """

    name: ClassVar[str]

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        *,
        timeout_s: float = 60.0,
        chunk_bytes: int = 2 << 20,
    ) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._mailbox = Mailbox(transport, timeout_s)
        self._timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._num_operations = 0
        self._failure: CommError | None = None

    def allreduce_(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        self._run(f"{self.name} all-reduce", tensor, self._allreduce)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by rank 0's."""
        self._run("broadcast", tensor, self._broadcast)

    def reduce_(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the tensor of rank `root` by the sum over all ranks, in rank order; the others keep theirs."""
        self._run(f"sum at rank {root}", tensor, partial(self._reduce, root))

    @abstractmethod
    def _allreduce(self, exchange: Exchange) -> None:
        """The algorithm; `exchange` holds the tensor and moves its chunks."""

    def _broadcast(self, exchange: Exchange) -> None:
        """Down a binary tree, each chunk forwarded as it arrives."""
        for chunk in exchange.chunks(0, exchange.numel):
            if self.rank:
                exchange.view(chunk).copy_(exchange.take((self.rank - 1) // 2, chunk))
            for child in binary_children(self.rank, self.size):
                exchange.send(child, chunk)

    def _reduce(self, root: int, exchange: Exchange) -> None:
        """Straight to the one who wants it."""
        for chunk in exchange.chunks(0, exchange.numel):
            if self.rank != root:
                exchange.send(root, chunk)
                continue
            own = exchange.view(chunk).clone()
            parts = [own if rank == root else exchange.take(rank, chunk) for rank in range(self.size)]
            total = exchange.view(chunk).copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)

    def _run(self, operation: str, tensor: torch.Tensor, algorithm: Callable[[Exchange], None]) -> None:
        _check_tensor(operation, tensor)
        if self._failure is not None:
            raise type(self._failure)(
                f"This {operation} cannot run: an earlier one failed ({self._failure}) Make a new collective."
            )
        if self.size == 1:
            return
        self._num_operations += 1
        exchange = Exchange(
            self._mailbox, tensor.detach(), f"{operation} {self._num_operations}", self._chunk_bytes
        )
        try:
            algorithm(exchange)
            # Chunks are sent from where they lie: all must have arrived before the caller may change them.
            self._transport.flush(self._timeout_s)
        except CommError as failure:
            self._failure = failure
            if isinstance(failure, ProtocolError):  # A loss or a silence they see for themselves.
                self._mailbox.tell_all(failure)
            raise


def binary_children(rank: int, size: int) -> list[int]:
    """The ranks below this one in a binary tree with rank 0 at the top."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]


def _check_tensor(operation: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise SpecError(
            f"A {operation} needs a flat, contiguous CPU tensor, found shape {tuple(tensor.shape)} on "
            f"{tensor.device}; use tensor.view(-1)."
        )
    if not tensor.is_floating_point():
        raise SpecError(f"A {operation} needs a tensor of a floating type, found {tensor.dtype}.")
