"""`int8` and `int8:stochastic`: one byte per element, and one scale per block of elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import take_tensor
from shoal.comm.compression.by_chance import ByChance
from shoal.comm.compression.chance import generator_of
from shoal.comm.compression.lossy import Lossy

BLOCK = 1024
"""Elements that share a scale: an outlier spoils the precision of its own block only."""
_STEPS = 127
# A scale times 127 must stay below infinity in float32, whichever way the scale was rounded.
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-20)


class Int8(Lossy):
    """Round to the nearest of 255 steps between the block's largest absolute value and its negative."""

    num_frames: ClassVar[int] = 2

    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() + _num_blocks(shape) * torch.float32.itemsize

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        return min(_LARGEST, super().limit(shape, dtype))

    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        steps = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
        scales = torch.empty(_num_blocks(values.shape), dtype=torch.float32, device=values.device)
        for block_values, block_steps, block_scales in _blocks(values, steps, scales):
            block_scales.copy_(block_values.abs().amax(dim=1, keepdim=True).div_(_STEPS))
            # A block of zeros, or of numbers so small that their scale vanishes, becomes zeros.
            divisors = block_scales.where(block_scales > 0, 1.0)
            block_steps.copy_(self._rounded(key, block_values.div(divisors)).clamp_(-_STEPS, _STEPS))
        return steps, scales

    def _rounded(self, key: Hashable, steps: torch.Tensor) -> torch.Tensor:
        """To whole steps, in place."""
        return steps.round_()

    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        steps, scales = frames
        return (
            take_tensor(steps, torch.int8, (shape.numel(),)),
            take_tensor(scales, torch.float32, (_num_blocks(shape),)),
        )

    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        steps, scales = frames
        for block_values, block_steps, block_scales in _blocks(out, steps, scales):
            block_values.copy_(block_steps).mul_(block_scales)


class StochasticInt8(ByChance, Int8):
    """Rounds up or down by chance, the likelier the nearer, so that the mean over calls is the tensor."""

    def _rounded(self, key: Hashable, steps: torch.Tensor) -> torch.Tensor:
        chances = torch.rand(steps.shape, generator=generator_of(self._chance.seed(key)), dtype=steps.dtype)
        return steps.add_(chances.to(steps.device)).floor_()


def _num_blocks(shape: torch.Size) -> int:
    return -(-shape.numel() // BLOCK)


def _blocks(
    values: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Matrices with a row per block: first of all whole blocks, then of the last, shorter one."""
    flat = values.view(-1)
    num_whole = flat.numel() // BLOCK
    end = num_whole * BLOCK
    if num_whole:
        yield flat[:end].view(-1, BLOCK), steps[:end].view(-1, BLOCK), scales[:num_whole, None]
    if end < flat.numel():
        yield flat[None, end:], steps[None, end:], scales[num_whole:, None]
