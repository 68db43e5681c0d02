"""`randomk:FRACTION`: elements that a seed chooses, so that their places need not be sent."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import take_tensor
from shoal.comm.compression.by_chance import ByChance
from shoal.comm.compression.chance import generator_of
from shoal.errors import ProtocolError


class RandomK(ByChance):
    """The given fraction of a tensor, at least one element, others in every call.

    Without feedback they are sent larger, by as much as they are fewer, so that the mean over calls is the tensor.
    """

    num_frames: ClassVar[int] = 2
    keeps_all_elements: ClassVar[bool] = False

    def __init__(self, text: str, fraction: float, *, error_feedback: bool = True) -> None:
        super().__init__(text, error_feedback=error_feedback)
        self._fraction = fraction

    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return torch.int64.itemsize + self._num_kept(shape) * dtype.itemsize

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        return super().limit(shape, dtype) / self._factor(shape)

    def _factor(self, shape: torch.Size) -> float:
        return 1.0 if self._error_feedback else shape.numel() / self._num_kept(shape)

    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        seed = self._chance.seed(key)
        chosen = values.view(-1)[self._chosen(seed, values.shape).to(values.device)]
        return torch.tensor([seed]), chosen.mul_(self._factor(values.shape)).to(dtype)

    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        seed = take_tensor(frames[0], torch.int64, (1,))
        if int(seed) < 0:
            raise ProtocolError(f"The seed of a {self.text} tensor should be 0 or more, found {int(seed)}.")
        return seed, take_tensor(frames[1], dtype, (self._num_kept(shape),))

    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        seed, values = frames
        out.zero_().view(-1)[self._chosen(int(seed), out.shape).to(out.device)] = values

    def _chosen(self, seed: int, shape: torch.Size) -> torch.Tensor:
        return torch.randperm(shape.numel(), generator=generator_of(seed))[: self._num_kept(shape)]

    def _num_kept(self, shape: torch.Size) -> int:
        return max(1, round(self._fraction * shape.numel()))
