"""What Keras's `fit` was given as data, as a task reads it: by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal.datasets.torch_loaders import from_loaders
from shoal.errors import TaskError
from shoal.keras.installed import load_keras
from shoal.keras.loss import split_target
from shoal.keras.task import as_pair, as_set, collated, is_arrays
from shoal.spec import Task

_BATCH_SIZE = 32
"""Keras's own, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The train set of a `fit`, and what it is validated on."""

    train: Any
    loader: DataLoader[Any] | None
    """Who says how batches are made, where there is one."""
    batch_size: int
    whole: int
    """Batches of all of the data."""
    steps: int
    """Batches of an epoch, as Keras counts them."""
    is_cut: bool
    """Whether an epoch is so many steps, and not all of the data."""
    shuffle: bool
    validation: tuple[Any, Any, Any] | None

    @classmethod
    def of(
        cls,
        x: Any,
        y: Any,
        batch_size: int | None,
        *,
        sample_weight: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        steps_per_epoch: int | None = None,
    ) -> FitData:
        """From what `fit` takes."""
        keras = load_keras()
        if validation_split and validation_data is None:
            from keras.src.trainers.data_adapters import array_slicing

            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        train: Any
        loader = None
        if isinstance(x, DataLoader) and y is None and x.batch_size and not isinstance(x.dataset, IterableDataset):
            train, batch_size, loader = x.dataset, x.batch_size, x
        elif is_arrays((x, y)):
            train = as_set("train", (x, y) if sample_weight is None else (x, y, sample_weight))
            batch_size = batch_size or _BATCH_SIZE
        else:
            raise TaskError(
                "shoal.keras.distribute: this strategy hands out samples by their numbers, so fit() takes arrays "
                f"x and y, or a DataLoader, found {type(x).__name__} and {type(y).__name__}; give it "
                "these, or use strategy='data'."
            )
        whole = math.ceil(len(train) / batch_size) if loader is None else len(loader)
        given = None if validation_data is None else keras.utils.unpack_x_y_sample_weight(validation_data)
        return cls(
            train=train,
            loader=loader,
            batch_size=batch_size,
            whole=whole,
            steps=steps_per_epoch or whole,
            is_cut=steps_per_epoch is not None,
            shuffle=bool(shuffle),
            validation=given,
        )

    def build(self, model: Any) -> None:
        """Let a model that knows no shapes yet see two samples."""
        inputs, target = self._collate()([self.train[0], self.train[min(1, len(self.train) - 1)]])
        y, weights = split_target(target)
        model._symbolic_build(data_batch=(list(inputs) if isinstance(inputs, tuple) else inputs, y, weights))

    def task(self, steps: int, epochs: int, **fields: Any) -> Task:
        """That trains one epoch more, after so many steps and epochs."""
        fields["epochs"] = epochs + 1
        if self.is_cut:
            end = steps + self.steps
            fields |= {"epochs": math.ceil(end / self.whole), "max_steps": end}
        if self.loader is None:
            task = Task(train=self.train, batch_size=self.batch_size, shuffle=self.shuffle, **fields)
        else:
            task = from_loaders(Task(train=self.loader, **fields))
        return replace(task, collate=self._collate())

    def _collate(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of samples, inputs and target apart."""
        if self.loader is None or self.loader.collate_fn is default_collate:
            return collated
        make = self.loader.collate_fn
        return lambda rows: as_pair(make(rows))
