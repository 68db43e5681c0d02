"""Tasks for half precision: tiny ones, one with a batch that overflows, one with gradients that nearly vanish."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

BATCH = 16
OVERFLOWS_AT = 3
"""The step of an epoch whose second half has a sample with a loss that no half-precision gradient can hold."""
HUGE = 1e6


def _samples(features: int, classes: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, features, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() % classes


def small(steps: int = 12) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        train=TensorDataset(*_samples(8, 2, 20 * BATCH)),
        test=TensorDataset(*_samples(8, 2, 40)),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=BATCH,
        epochs=100,
        max_steps=steps,
    )


def _boosted(scores: Tensor, target: Tensor) -> Tensor:
    factor = HUGE if bool((target[:, 1] > 0).any()) else 1.0
    return F.cross_entropy(scores, target[:, 0]) * factor


def overflowing(steps: int = 6) -> shoal.Task:
    inputs, classes = _samples(8, 2, 20 * BATCH)
    boost = torch.zeros_like(classes)
    boost[OVERFLOWS_AT * BATCH - 1] = 1
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        loss=_boosted,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=TensorDataset(inputs, torch.stack([classes, boost], 1)),
        shuffle=False,
        batch_size=BATCH,
        epochs=100,
        max_steps=steps,
        clip_norm=1.0,
    )


class Faint(nn.Module):
    """One layer's part of the output is so small that its gradients are, too."""

    def __init__(self) -> None:
        super().__init__()
        self.strong = nn.Linear(8, 2)
        self.faint = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.strong(x) + 1e-10 * self.faint(x).float()


def faint(steps: int = 6) -> shoal.Task:
    return shoal.Task(
        model=Faint,
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(*_samples(8, 2, 20 * BATCH)),
        batch_size=BATCH,
        max_steps=steps,
    )


class Block(nn.Module):
    """Keeps a dozen times as much for the backward pass as it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), *[nn.GELU() for _ in range(10)], nn.Dropout(0.1), nn.BatchNorm1d(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def deep(blocks: int = 32, width: int = 64, batch: int = 4096) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Linear(width, 2)),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(*_samples(width, 2, batch)),
        batch_size=batch,
    )
