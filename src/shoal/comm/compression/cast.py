"""`bf16` and `fp16`: every element rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import take_tensor
from shoal.comm.compression.lossy import Lossy


class Cast(Lossy):
    """Round to a narrower type. Values beyond its range saturate; the feedback brings the rest."""

    num_frames: ClassVar[int] = 1

    def __init__(self, text: str, dtype: torch.dtype, *, error_feedback: bool = True) -> None:
        super().__init__(text, error_feedback=error_feedback)
        self._dtype = dtype

    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * self._dtype.itemsize

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        return min(torch.finfo(self._dtype).max, super().limit(shape, dtype))

    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return (values.to(self._dtype),)

    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return (take_tensor(frames[0], self._dtype, shape),)

    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        out.copy_(frames[0])
