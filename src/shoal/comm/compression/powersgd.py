"""`powersgd:RANK`: a matrix as the product of two thin ones (Vogels, Karimireddy and Jaggi, 2019)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import take_tensor
from shoal.comm.compression.lossy import Lossy, named_under, working_type

_BASIS = "basis/"


class PowerSgd(Lossy):
    """One power iteration per call towards the leading singular vectors, started where the last call ended.

    Matrices are what the caller gives two dimensions; vectors travel raw.
    """

    num_frames: ClassVar[int] = 2
    keeps_all_elements: ClassVar[bool] = False

    def __init__(self, text: str, rank: int, *, error_feedback: bool = True) -> None:
        super().__init__(text, error_feedback=error_feedback)
        self._rank = rank
        self._bases: dict[Hashable, torch.Tensor] = {}
        """Per tensor, orthonormal columns that span about its rows' main directions."""

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        self._bases.pop(key, None)

    def remembered(self) -> dict[str, torch.Tensor]:
        return super().remembered() | {f"{_BASIS}{key}": basis.cpu() for key, basis in self._bases.items()}

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        super().remember(state)
        self._bases = named_under(_BASIS, state)

    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        if len(shape) != 2:
            return shape.numel() * dtype.itemsize
        return self._rank * sum(shape) * dtype.itemsize

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        # No sum of products can overflow then, whatever the directions are.
        return min(torch.finfo(working_type(dtype)).max / shape.numel(), super().limit(shape, dtype))

    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        left = orthonormal(values @ self._basis(key, values))
        # The same as values.t() @ left, but along the rows of both: twenty times faster.
        right = (left.t() @ values).t().contiguous()
        # Kept normalised: products of products would grow or vanish with the gradients' size. And as it lies in a
        # checkpoint: with other strides a product has other bits.
        self._bases[key] = orthonormal(right).contiguous()
        return left.to(factor_type(dtype)), right.to(factor_type(dtype))

    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        left, right = frames
        num_rows, num_columns = shape
        return (
            take_tensor(left, factor_type(dtype), (num_rows, self._rank)),
            take_tensor(right, factor_type(dtype), (num_columns, self._rank)),
        )

    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        left, right = (frame.to(working_type(out.dtype)) for frame in frames)
        if out.dtype == left.dtype:
            torch.mm(left, right.t(), out=out)
        else:
            limit = torch.finfo(out.dtype).max
            out.copy_((left @ right.t()).clamp_(-limit, limit))

    def _basis(self, key: Hashable, matrix: torch.Tensor) -> torch.Tensor:
        basis = self._bases.get(key)
        if basis is not None and basis.shape[0] == matrix.shape[1]:
            return basis.to(matrix.device)
        # The same directions in every process and every repetition of a run.
        generator = torch.Generator().manual_seed(matrix.shape[1])
        first = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=matrix.dtype)
        return orthonormal(first.to(matrix.device))


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """The factors of float16 tensors need more range than those have: entries add up along a row."""
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span what `columns` span, and more where those depend on one another."""
    return torch.linalg.qr(columns).Q
