"""What something that a slot brings looks like, as a few whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.errors import TaskError
from shoal.step.passes import Brought

MOST_AXES = 8
LOOK_WORDS = 3 + MOST_AXES
"""The question, the type, how many axes, and how long they are."""
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def look_of(brought: Brought) -> list[int]:
    """As many numbers as `LOOK_WORDS`."""
    values = brought.values
    if values.dtype not in _DTYPES or values.dim() > MOST_AXES:
        raise TaskError(
            f"shoal.gather takes numbers of torch's plain types with up to {MOST_AXES} axes, found {values.dtype} "
            f"with {values.dim()}."
        )
    shape = [*values.shape, *[0] * (MOST_AXES - values.dim())]
    return [int(brought.question), _DTYPES.index(values.dtype), values.dim(), *shape]


def seen_in(words: Sequence[int]) -> tuple[int, torch.dtype, tuple[int, ...]]:
    """Question, type and shape."""
    question, dtype, axes, *shape = words
    return question, _DTYPES[dtype], tuple(shape[:axes])
