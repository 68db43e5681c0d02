"""Read batches of samples by index."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from shoal.ledger import Cut
from shoal.ledger.order import mix
from shoal.spec import Task
from shoal.strategies.base import Part


class Feed:
    """Turns sample numbers into batches of a task."""

    def __init__(self, task: Task, dataset: Any, *, numerics: str = "task", device: str = "cpu") -> None:
        self._dataset = dataset
        self._collate = task.collate or default_collate
        self._weight = task.weight
        self._accumulate = task.accumulate
        self._double = numerics == "float64"
        self._device = device
        # Plain tensors are cut in one go instead of sample by sample.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and task.collate is None else None

    def batch(self, samples: np.ndarray) -> Any:
        """The batch of these samples."""
        if self._tensors is not None:
            index = torch.from_numpy(samples)
            batch: Any = tuple(tensor[index] for tensor in self._tensors)
        elif hasattr(self._dataset, "__getitems__"):
            batch = self._collate(self._dataset.__getitems__(samples.tolist()))
        else:
            batch = self._collate([self._dataset[number] for number in samples.tolist()])
        if self._double:
            batch = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
        return batch if self._device == "cpu" else map_tensors(batch, lambda t: t.to(self._device))

    def weight(self, batch: Any, samples: np.ndarray) -> float:
        """What a batch counts in every mean."""
        return float(len(samples)) if self._weight is None else float(self._weight(batch))

    def part(self, cut: Cut, seed: int, step: int) -> Part:
        """One slot's part of a step, read only when it is needed."""
        total = float(cut.batch_samples) if self._weight is None else None
        return Part(cut.slot, self._loader(cut, mix(seed, step, cut.slot)), total)

    def _loader(self, cut: Cut, key: int) -> Callable[[], Iterator[tuple[Any, float]]]:
        def load() -> Iterator[tuple[Any, float]]:
            if self._tensors is None:  # augmentation may draw from these; torch's is keyed by the strategy
                random.seed(key)
                np.random.seed(key & 0xFFFFFFFF)
            for samples in (
                np.array_split(cut.samples, self._accumulate) if self._accumulate > 1 else [cut.samples]
            ):
                if len(samples):
                    batch = self.batch(samples)
                    yield batch, self.weight(batch, samples)

        return load


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    return value
