"""How a tensor lies in memory that processes share."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from shoal.arena.grid import Flat


def flat_of(param: torch.Tensor) -> Flat:
    """What the grid must know about a tensor."""
    return Flat(str(param.dtype), param.element_size(), param.numel())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, of a contiguous tensor.

    One that has a single element, or none, is contiguous whatever its strides are, and keeps them in any view.
    """
    assert tensor.is_contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides where they fill its memory (channels_last is kept), else contiguous ones."""
    return torch.empty_like(param, memory_format=torch.preserve_format, device="meta").stride()


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of its own, which a compiled pass takes for any other tensor."""
    return from_dlpack(to_dlpack(tensor)) if tensor.numel() else tensor
