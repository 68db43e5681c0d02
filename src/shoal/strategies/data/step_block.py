"""What changes from step to step gets to a captured step in one copy, and what it came to gets back in another.

Numbers and the tensors of its batches lie one behind the other in a block on the GPU, where the graph reads them.
The host has a few rooms of the same layout in pinned memory, which it fills in turn: so it prepares a step while
the GPU is at those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shoal.arena.tensors import apart
from shoal.step.compute import DeferredSums

ROOMS = 4
"""One more than steps are open; where more are, the oldest is waited for."""
_ALIGN = 256


class StepBlock:
    """Where a captured step reads."""

    def __init__(self, numbers: int, like: Sequence[torch.Tensor], device: str) -> None:
        """`like`: the tensors of the batches that come from the host."""
        sizes = [_aligned(4 * numbers), *(_aligned(tensor.nbytes) for tensor in like)]
        self._offsets = list(accumulate(sizes, initial=0))
        self._like = [(tensor.shape, tensor.dtype) for tensor in like]
        self._num_numbers = numbers
        self.bytes = torch.zeros(self._offsets[-1], dtype=torch.uint8, device=device)
        self.numbers = [apart(number) for number in self._numbers_in(self.bytes)]
        self.tensors = [apart(tensor) for tensor in self._tensors_in(self.bytes)]

    def rooms(self, told: torch.Tensor) -> list[StepRoom]:
        """Where the host prepares what is read here, and finds what is `told`."""
        return [self._room(told) for _ in range(ROOMS)]

    def _room(self, told: torch.Tensor) -> StepRoom:
        pinned = torch.zeros(self.bytes.shape, dtype=torch.uint8, pin_memory=True)
        found = torch.zeros(told.shape, dtype=told.dtype, pin_memory=True)
        return StepRoom(self.bytes, pinned, self._numbers_in(pinned), self._tensors_in(pinned), found)

    def _numbers_in(self, block: torch.Tensor) -> torch.Tensor:
        return block[: 4 * self._num_numbers].view(torch.float32)

    def _tensors_in(self, block: torch.Tensor) -> list[torch.Tensor]:
        return [
            block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(self._offsets[1:-1], self._like, strict=True)
        ]


class StepRoom:
    """One step's part of the host's memory."""

    def __init__(
        self,
        block: torch.Tensor,
        pinned: torch.Tensor,
        numbers: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        told: torch.Tensor,
    ) -> None:
        self._block = block
        self._pinned = pinned
        self._numbers = numbers.numpy()
        self._tensors = tensors
        self._told = told
        self._event = torch.cuda.Event()
        self._last: DeferredSums | None = None

    def send(self, numbers: Sequence[float], tensors: Sequence[torch.Tensor]) -> None:
        """Let the next replay read these."""
        if self._last is not None:  # what it came to still lies here, and the GPU may still read
            self._last.resolve()
        self._numbers[:] = numbers
        for room, tensor in zip(self._tensors, tensors, strict=True):
            room.copy_(tensor)
        self._block.copy_(self._pinned, non_blocking=True)

    def fetch(self, told: torch.Tensor, found: DeferredSums, weights: Sequence[float]) -> None:
        """Let `found` be what the replay tells."""
        self._told.copy_(told, non_blocking=True)
        self._event.record()
        found.is_sent(self._told, self._event, weights)
        self._last = found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
