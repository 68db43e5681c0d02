"""Tasks of clients from outside: the same model, data of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal


def _data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 8, generator=generator) + 2 * target[:, None], target)


def task(seed: int = 0, width: int = 16, normalised: bool = False, ema: float | None = None) -> shoal.Task:
    """The server's, or with another seed a client's."""
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width) if normalised else nn.Tanh(), nn.Linear(width, 3)
        ),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=_data(48, seed),
        test=_data(60, 100),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        ema=ema,
    )


def client(seed: int = 1, **more: object) -> shoal.Task:
    """It has no test set."""
    return replace(task(seed, **more), test=None)
