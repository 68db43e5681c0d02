"""`sign`: one bit per element, and one scale per block of elements."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import take_tensor
from shoal.comm.compression.lossy import Lossy

BLOCK = 1024
"""Elements that share a scale."""
_LARGEST = torch.finfo(torch.float32).max


class Sign(Lossy):
    """Whether an element is above zero; what arrives is as large as its block's elements are in the mean.

    Only with feedback does that come to what was meant.
    """

    num_frames: ClassVar[int] = 2
    keeps_all_elements: ClassVar[bool] = False

    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return _num_bytes(shape) + _num_blocks(shape) * torch.float32.itemsize

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        return min(_LARGEST / BLOCK, super().limit(shape, dtype))

    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        flat = values.view(-1)
        blocks = torch.nn.functional.pad(flat.abs(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        counts = blocks.new_full((len(blocks),), float(BLOCK))
        counts[-1] = (flat.numel() - 1) % BLOCK + 1
        return pack_bits(flat > 0), (blocks.sum(1) / counts).float()

    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        bits, scales = frames
        return (
            take_tensor(bits, torch.uint8, (_num_bytes(shape),)),
            take_tensor(scales, torch.float32, (_num_blocks(shape),)),
        )

    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        bits, scales = frames
        flat = out.view(-1)
        is_above = unpack_bits(bits, flat.numel())
        sizes = scales.to(torch.promote_types(out.dtype, torch.float32)).repeat_interleave(BLOCK)[: flat.numel()]
        flat.copy_(torch.where(is_above, sizes, -sizes))


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Eight to a byte, the first the highest."""
    return torch.from_numpy(np.packbits(bits.numpy())) if bits.device.type == "cpu" else pack_anywhere(bits)


def pack_anywhere(bits: torch.Tensor) -> torch.Tensor:
    """The same in torch's own operations, which is slower in the host's memory."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (padded.to(torch.uint8) << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first so many of what `pack_bits` has packed."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()
    return unpack_anywhere(packed, count)


def unpack_anywhere(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The same in torch's own operations."""
    return (packed[:, None] >> _shifts(packed.device) & 1).view(-1)[:count].bool()


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _num_bytes(shape: torch.Size) -> int:
    return -(-shape.numel() // 8)


def _num_blocks(shape: torch.Size) -> int:
    return -(-shape.numel() // BLOCK)
