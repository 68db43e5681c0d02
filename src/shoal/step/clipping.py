"""Clipping by the norm of the whole gradient, with the same bits however the model is cut.

Every parameter consists of units of 16 KiB from its beginning, the last one shorter. Whoever holds some of them
writes their squared norms down; everybody sums all of them in the same order. Where a task clips, the model is
cut only between units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shoal.arena import Chunk, Flat, Piece
from shoal.arena.grid import ALIGN
from shoal.spec.model_size import UNIT_BYTES


def cut_bytes(clip_norm: float | None) -> int:
    """Inside a parameter, cuts fall at multiples of so many bytes."""
    return ALIGN if clip_norm is None else UNIT_BYTES


def clip_factor(squares: np.ndarray, clip_norm: float) -> float:
    """What a gradient is to be multiplied by, from the squared norms of all its units; as torch clips.

    numpy adds up in pairs that follow from the array's length alone, so the sum depends on the units' order and on
    nothing else: whoever measured them.
    """
    norm = float(squares.sum()) ** 0.5
    return min(1.0, clip_norm / (norm + 1e-6))


def clip_together(
    gradients: Sequence[torch.Tensor],
    counted: Iterable[torch.Tensor],
    clip_norm: float,
    sum_over_all: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Clip this process's gradients by the norm over all processes, each of which counts some of its own."""
    squares = sum((float(torch.linalg.vector_norm(grad)) ** 2 for grad in counted), start=0.0)
    total = sum_over_all(torch.tensor([squares], dtype=torch.float64))
    factor = clip_factor(total.numpy(), clip_norm)
    if gradients and factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)


class Units:
    """The units of a model, numbered through all its parameters."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self._sizes = [UNIT_BYTES // flat.itemsize for flat in flats]
        counts = (-(-flat.numel // size) for flat, size in zip(flats, self._sizes, strict=True))
        self._firsts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def size(self, piece: Piece) -> int:
        """Elements of a unit of this piece's parameter."""
        return self._sizes[piece.param]

    def numbers(self, pieces: Iterable[Piece]) -> np.ndarray:
        """The units that these pieces consist of, in the pieces' order."""
        ranges = []
        for piece in pieces:
            size, first = self._sizes[piece.param], self._firsts[piece.param]
            ranges.append(np.arange(first + piece.start // size, first - (-piece.stop // size)))
        return np.concatenate(ranges) if ranges else np.arange(0)


@dataclass(frozen=True)
class _Stretch:
    """Units of one length in one piece."""

    param: int
    span: slice
    """Of the chunk's elements."""
    width: int
    units: slice
    """Of the chunk's units."""


class ChunkNorms:
    """Squared norms of the units of one chunk's gradient."""

    def __init__(self, units: Units, chunk: Chunk) -> None:
        self.numbers = units.numbers(chunk.pieces)
        """Of the units, in the order in which their norms are given."""
        self._stretches: list[_Stretch] = []
        at = 0
        for piece in chunk.pieces:
            size, numel = units.size(piece), piece.stop - piece.start
            start = (piece.offset - chunk.offset) * size // UNIT_BYTES
            for count, width in ((numel // size, size), (1, numel % size)):
                if count and width:
                    stop = start + count * width
                    self._stretches.append(_Stretch(piece.param, slice(start, stop), width, slice(at, at + count)))
                    start, at = stop, at + count

    def measure(self, gradient: torch.Tensor, has_gradient: Sequence[bool] | None = None) -> np.ndarray:
        """The squared norms of this chunk's flat gradient; 0 where `has_gradient` denies the parameter one.

        Row by row of equal width: a unit's norm must not depend on what lies beside it in this chunk.
        """
        norms = torch.zeros(len(self.numbers), dtype=gradient.dtype.to_real())
        for stretch in self._stretches:
            if has_gradient is None or has_gradient[stretch.param]:
                torch.linalg.vector_norm(
                    gradient[stretch.span].view(-1, stretch.width), dim=1, out=norms[stretch.units]
                )
        return np.square(norms.double().numpy())
