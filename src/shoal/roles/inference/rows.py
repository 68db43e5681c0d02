"""What a model returned, as one row for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from shoal.comm.desk_words import ONLY
from shoal.errors import SpecError


def rows_of(result: Any, count: int) -> dict[str, np.ndarray]:
    """By name: what there is for each of so many samples. What else a model returns, as a loss, is left out."""
    found = {str(name): value for name, value in _parts(result) if _has_rows(value, count)}
    if not found:
        what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise SpecError(
            f"predict writes one row per sample, but for {count} samples the model returned {what}; let the model "
            "return its main output when not training, with the batch as its first dimension."
        )
    arrays = {name: _array(value) for name, value in found.items()}
    return arrays if len(arrays) > 1 else {ONLY: next(iter(arrays.values()))}


def _parts(result: Any) -> Iterable[tuple[Any, Any]]:
    """The values of a model's output by their names or numbers."""
    if isinstance(result, Mapping):  # so are the outputs of transformers
        return result.items()
    if dataclasses.is_dataclass(result):
        return ((field.name, getattr(result, field.name)) for field in dataclasses.fields(result))
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return result._asdict().items()
    return enumerate(result) if isinstance(result, (tuple, list)) else [(ONLY, result)]


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:1] == (count,)


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).contiguous().numpy()
