"""Many tensors as few long vectors, and where each lies in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Vectors = dict[torch.dtype, torch.Tensor]
"""One for each type of number that is computed with."""


@dataclass(frozen=True, kw_only=True)
class ValueSpan:
    """Where a tensor lies in its vector."""

    name: str
    kind: torch.dtype
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def of(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> torch.Tensor:
        """Its part of these vectors, in its shape."""
        return vectors[self.kind][self.start : self.stop].view(self.shape)
