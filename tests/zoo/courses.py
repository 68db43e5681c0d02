"""One small model, trained in the ways that people train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from zoo_data import BATCH, CLASSES, COLUMNS, SAMPLES, STEPS, adamw, classes_of, table, task

import shoal


def perceptron(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES))


def averaged() -> shoal.Task:
    """The mean of its past is what is evaluated."""
    inputs = table()
    data = TensorDataset(inputs, classes_of(inputs))
    return task(perceptron, train=data, test=data, ema=0.9, metrics={"accuracy": shoal.metrics.accuracy})


def arrays() -> shoal.Task:
    """As numpy has them, with dropout, and a mean over the last steps."""
    inputs = table()
    data = inputs.numpy(), classes_of(inputs).numpy()
    return task(lambda: perceptron(0.3), train=data, test=data, swa=3, optimizer=adamw)


def in_pieces() -> shoal.Task:
    """Parts of batches, gradients that are clipped, rates that rise and fall."""
    inputs = table()
    return task(
        perceptron,
        inputs,
        classes_of(inputs),
        accumulate=2,
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS),
    )


def from_loader() -> shoal.Task:
    """A `DataLoader` that draws some samples more often than others."""
    inputs = table()
    targets = classes_of(inputs)
    sampler = WeightedRandomSampler((1.0 + targets).tolist(), SAMPLES)
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, sampler=sampler)
    return task(perceptron, train=loader, batch_size=shoal.Task.batch_size)


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Nobody knows how many there are."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs = table()
        yield from zip(inputs, classes_of(inputs), strict=True)


def stream() -> shoal.Task:
    """Read by a process beside each worker."""
    return task(perceptron, train=Rows(), epochs=1, loaders=1)


def two_rates() -> shoal.Task:
    """Groups of parameters with settings of their own, and a rate that falls where the loss does not."""

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        weights = [param for param in params if param.dim() > 1]
        biases = [param for param in params if param.dim() == 1]
        return torch.optim.Adam(
            [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.05}], lr=0.01
        )

    inputs = table()
    return task(
        perceptron,
        inputs,
        classes_of(inputs),
        optimizer=optimizer,
        scheduler=lambda made: torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=1),
    )
