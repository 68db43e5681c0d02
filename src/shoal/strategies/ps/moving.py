"""Buffers that move during training (BatchNorm's statistics), kept by the servers of the first shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.model.buffers import MovingBuffers
from shoal.strategies.ps.memory import ServedMemory

KEEPER = 0
"""The shard whose servers keep them."""


class MovingMean:
    """Each update commits the weighted mean of what the workers left, as one process with slots would."""

    def __init__(self, memory: ServedMemory, buffers: MovingBuffers) -> None:
        self._memory = memory
        self._buffers = buffers

    def initialise(self, copy: int) -> None:
        """Start from the model's own values."""
        self._memory.moving(copy).copy_(self._buffers.own)

    def commit(self, copy: int, left: Sequence[tuple[torch.Tensor, float]]) -> None:
        """Merge what the workers of one update left."""
        self.merge(self._memory.moving(copy), left)

    def merge(self, target: torch.Tensor, left: Sequence[tuple[torch.Tensor, float]]) -> None:
        """Put the weighted mean of what was left there."""
        self._buffers.merge(target, [(block, weight) for block, weight in left if weight > 0])
