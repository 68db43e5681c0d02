"""What Keras's `fit` was given as data, as a task reads it: by number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from shoal.errors import TaskError
from shoal.keras.installed import load_keras
from shoal.keras.loss import split_target
from shoal.keras.task import as_set, collated, is_arrays

_BATCH_SIZE = 32
"""Keras's own, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The train set of a `fit`, and what it is validated on."""

    train: Any
    batch_size: int
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
        if isinstance(x, DataLoader) and y is None and x.batch_size:
            train, batch_size = x.dataset, x.batch_size
        elif is_arrays((x, y)):
            train = as_set("train", (x, y) if sample_weight is None else (x, y, sample_weight))
            batch_size = batch_size or _BATCH_SIZE
        else:
            raise TaskError(
                "shoal.keras.distribute: this strategy hands out samples by their numbers, so fit() takes arrays "
                f"x and y, or a DataLoader, found {type(x).__name__} and {type(y).__name__}; give it "
                "these, or use strategy='data'."
            )
        steps = steps_per_epoch or math.ceil(len(train) / batch_size)
        given = None if validation_data is None else keras.utils.unpack_x_y_sample_weight(validation_data)
        return cls(
            train=train,
            batch_size=batch_size,
            steps=steps,
            is_cut=steps_per_epoch is not None,
            shuffle=bool(shuffle),
            validation=given,
        )

    def build(self, model: Any) -> None:
        """Let a model that knows no shapes yet see two samples."""
        inputs, target = collated([self.train[0], self.train[min(1, len(self.train) - 1)]])
        y, weights = split_target(target)
        model._symbolic_build(data_batch=(list(inputs) if isinstance(inputs, tuple) else inputs, y, weights))

    def fields(self, steps: int, epochs: int) -> dict[str, Any]:
        """Of the task that trains one epoch more, after so many steps and epochs."""
        given: dict[str, Any] = {
            "train": self.train, "batch_size": self.batch_size, "shuffle": self.shuffle, "collate": collated
        }  # fmt: skip
        if not self.is_cut:
            return {**given, "epochs": epochs + 1}
        whole = math.ceil(len(self.train) / self.batch_size)
        return {**given, "epochs": math.ceil((steps + self.steps) / whole), "max_steps": steps + self.steps}
