"""Arrays and tensors as a data set: of `(X, y)` sample `n` is row `n` of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shoal.errors import TaskError


class Arrays:
    """Rows of arrays and tensors, in the tuples and dicts in which these were given.

    Only the rows of a batch are copied, so that a file which numpy maps may be larger than memory. What numpy
    holds as float64, its own default, comes as torch's default type; tensors keep theirs.
    """

    def __init__(self, arrays: Any, part: str = "train") -> None:
        leaves = list(_leaves(arrays))
        lengths = sorted({len(leaf) for leaf in leaves})
        if len(lengths) > 1:
            found = " and ".join(str(length) for length in lengths)
            raise TaskError(f"Task: the {part} set is arrays of {found} rows; give each a row for every sample.")
        for leaf in leaves:
            _check_type(leaf, part)
        self._arrays = arrays
        self._length = lengths[0]
        self.is_mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
        """Whether rows are read from a file, which may take a while."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        if not -self._length <= number < self._length:
            raise IndexError(f"a sample's number must lie within {self._length} samples, found {number}.")
        return _changed(self.rows(np.array([number])), lambda rows: rows[0])

    def rows(self, numbers: np.ndarray) -> Any:
        """The batch of these samples, cut in one go."""
        return _changed(self._arrays, lambda array: _rows(array, numbers))


def is_arrays(value: Any) -> bool:
    """Whether these are arrays whose rows are samples, rather than a tuple of a few samples."""
    if type(value) is dict:
        return bool(value) and all(type(name) is str and _is_array(array) for name, array in value.items())
    if type(value) is tuple:
        return bool(value) and _is_array(value[-1]) and all(_is_array(each) or _is_group(each) for each in value)
    return isinstance(value, np.ndarray) and value.ndim > 0  # a tensor's rows are tensors already


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0


def _is_group(value: Any) -> bool:
    """Several inputs that belong together."""
    if type(value) is dict:
        return is_arrays(value)
    return type(value) is tuple and bool(value) and all(map(_is_array, value))


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _leaves(each)
    else:
        yield value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_changed(each, change) for each in value)
    if type(value) is dict:
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


def _rows(array: Any, numbers: np.ndarray) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array[torch.from_numpy(numbers)]
    rows = torch.from_numpy(np.ascontiguousarray(array[numbers]))
    return rows.to(torch.get_default_dtype()) if rows.dtype == torch.float64 else rows


def _check_type(array: Any, part: str) -> None:
    try:
        _rows(array, np.empty(0, dtype=np.int64))
    except TypeError:
        raise TaskError(
            f"Task: the {part} set holds an array of type {array.dtype}, which torch has no numbers for; turn it "
            "into numbers, or use a data set of samples and collate=."
        ) from None
