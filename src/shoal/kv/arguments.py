"""What a store is called with: keys, values for them, rooms for what is pulled, numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import SpecError

_PIECE_BYTES = 16 << 20

Keys = str | int | Sequence[str | int]


def row_numbers(key: str, given: Tensor | Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Rows that a key of this shape has."""
    rows, count = torch.as_tensor(given).detach().cpu().reshape(-1), shape[0] if shape else 1
    if len(rows) and (rows.is_floating_point() or rows.dtype == torch.bool):
        raise SpecError(
            f"kv: rows of the key {key!r} are whole numbers, found {rows.dtype}; give them as torch.int64."
        )
    rows = rows.to(torch.int64)
    if len(wrong := rows[(rows < 0) | (rows >= count)]):
        raise SpecError(f"kv: the key {key!r} has the rows 0 to {count - 1}, found {int(wrong[0])}; name others.")
    return rows


def names(key: Keys) -> list[str]:
    """One or several, as text."""
    return [str(key)] if isinstance(key, str | int) else [str(one) for one in key]


def pairs(key: Keys, value: Any) -> list[tuple[str, Any]]:
    """Keys with their values."""
    named = names(key)
    values = [value] if isinstance(key, str | int) else list(value)
    if len(named) != len(values):
        raise SpecError(f"kv: {len(named)} keys need as many values, found {len(values)}; give one for each.")
    return list(zip(named, values, strict=True))


def total(given: Tensor | Sequence[Tensor]) -> Tensor:
    """A value, or several for one key added up."""
    if not isinstance(given, list | tuple):
        return as_tensor(given)
    found = as_tensor(given[0]).clone()
    for one in given[1:]:
        found = found + as_tensor(one)
    return found


def rooms(out: Any, key: Keys, count: int) -> list[list[Tensor]]:
    """By key: where its values are wanted."""
    if out is None:
        return [[] for _ in range(count)]
    given = [out] if isinstance(key, str | int) else list(out) if isinstance(out, list | tuple) else [out]
    if len(given) != count:
        raise SpecError(f"kv: {count} keys need as many tensors in out=, found {len(given)}; give one for each.")
    return [list(each) if isinstance(each, list | tuple) else [each] for each in given]


def as_tensor(given: Any) -> Tensor:
    """Refuses what is none."""
    if not isinstance(given, Tensor):
        raise SpecError(
            f"kv: a value is a tensor of torch's, found {type(given).__name__}; make it one by torch.as_tensor."
        )
    return given


def as_rows(tensor: Tensor) -> Tensor:
    """A table with the rows of a tensor."""
    return tensor.view(len(tensor), columns(tuple(tensor.shape))) if tensor.dim() else tensor.view(1, 1)


def columns(shape: tuple[int, ...]) -> int:
    """Of such a table."""
    return max(1, int(torch.Size(shape[1:]).numel()))


def rows_of_piece(columns: int, dtype: torch.dtype) -> int:
    """How many rows fit a message."""
    return max(1, _PIECE_BYTES // max(1, columns * dtype.itemsize))


def pieces(rows: Tensor) -> list[tuple[Tensor, int, bool]]:
    """Views that fit a message, where each begins, and whether it is the last."""
    size = rows_of_piece(rows.shape[1], rows.dtype)
    parts = rows.split(size)
    return [(part, number * size, number == len(parts) - 1) for number, part in enumerate(parts)]
