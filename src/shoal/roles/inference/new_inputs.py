"""New data as samples of a task: typed and shaped as the task's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import SpecError
from shoal.feed.columns import TARGETS
from shoal.feed.records import Records
from shoal.feed.shipping import read_samples
from shoal.spec import Task

_NUMBERS = (bool, int, float)


class NewInputs:
    """A data set of records. What is in a sample besides the model's inputs, a target, is that of the example: so
    the task's own `collate` makes batches of them, and nobody looks at it.
    """

    def __init__(self, task: Task, records: Records, example: Any) -> None:
        self.records = records
        self.start = 0
        """The number of the first record, for whoever is told of one."""
        self._prepare = task.prepare
        self._is_pair = isinstance(example, (tuple, list))
        self._inputs, self._rest = (example[0], tuple(example[1:])) if self._is_pair else (example, ())
        self._targets: dict[Any, Any] = {}
        """Those columns of a table which `loss=` compares with."""
        if task.loss is not None and isinstance(example, Mapping):
            self._targets = {name: example[name] for name in TARGETS if name in example}

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples."""
        records = read_samples(self.records, numbers)
        return [self._sample(record, self.start + number) for record, number in zip(records, numbers, strict=True)]

    def _sample(self, record: Any, number: int) -> Any:
        inputs = fitted(_loaded(record), self._inputs, number) if self._prepare is None else self._prepare(record)
        if self._is_pair:
            return (inputs, *self._rest)
        return {**self._targets, **inputs} if self._targets else inputs


def _loaded(record: Any) -> Any:
    """What is in a record's file, where it is one."""
    if not isinstance(record, Path):
        return record
    if record.suffix != ".npy":
        raise SpecError(
            f"predict: how {record} becomes what the model takes only the task knows; set "
            "Task(prepare=lambda path: …), or give files that end in .npy."
        )
    return np.load(record, allow_pickle=False)


def fitted(value: Any, example: Any, number: int) -> Any:
    """A record's value as the example of the task is: its type, and its shape where that differs in form alone."""
    if isinstance(example, (torch.Tensor, np.ndarray)):
        return _fitted_numbers(value, example, number)
    if isinstance(example, Mapping):
        if not isinstance(value, Mapping):
            names = ", ".join(map(str, example))
            raise _misfit(number, f"{type(value).__name__}", f"named values ({names}), as a line of .jsonl can be")
        return {
            name: fitted(item, example[name], number) if name in example else item for name, item in value.items()
        }
    if isinstance(example, list) and all(type(item) in _NUMBERS for item in example):
        return list(value)  # of any length, as tokens are
    if isinstance(example, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(example):
            raise _misfit(number, f"{type(value).__name__}", f"{len(example)} values")
        return type(example)(fitted(item, of, number) for item, of in zip(value, example, strict=True))
    if type(example) in _NUMBERS:
        return type(example)(value)
    return value


def _fitted_numbers(value: Any, example: Any, number: int) -> Any:
    try:
        array = np.array(value)  # a copy: rows of a file cannot be written to
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError):
        raise _misfit(number, repr(value)[:60], f"numbers of shape {tuple(example.shape)}") from None
    # Sequences may have another length than the example, not another form.
    if tensor.dim() != example.ndim:
        if tensor.numel() != math.prod(example.shape):
            raise _misfit(number, f"shape {tuple(tensor.shape)}", f"shape {tuple(example.shape)}")
        tensor = tensor.reshape(tuple(example.shape))
    if isinstance(example, np.ndarray):
        return tensor.numpy().astype(example.dtype)
    return tensor.to(example.dtype)


def _misfit(number: int, found: str, wanted: str) -> SpecError:
    return SpecError(
        f"predict: record {number} of the input is {found}, but this task's samples are {wanted}; give it the "
        "same form, or set Task(prepare=…)."
    )
