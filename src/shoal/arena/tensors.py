"""How a tensor lies in memory that processes share."""

from __future__ import annotations

import torch

from shoal.arena.grid import Flat


def flat_of(param: torch.Tensor) -> Flat:
    """What the grid must know about a tensor."""
    return Flat(str(param.dtype), param.element_size(), param.numel())


def dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides where they fill its memory (channels_last is kept), else contiguous ones."""
    return torch.empty_like(param, memory_format=torch.preserve_format, device="meta").stride()
