"""A task whose steps take a known time, so that shares can follow it on a busy machine."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

SECONDS_PER_SAMPLE = 0.001
UNPACED = "PACED_TASKS_UNPACED"
"""Set in the environment where only what is computed matters."""


class Paced(nn.Module):
    """Takes its time for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        if UNPACED not in os.environ:
            time.sleep(SECONDS_PER_SAMPLE * len(inputs))
        return self.layers(inputs)


def _weighted_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Class c counts c + 1 times."""
    return F.cross_entropy(outputs, targets, weight=torch.arange(1, 5, dtype=outputs.dtype))


def paced(steps: int = 60, batch_size: int = 32, accumulate: int = 1, weighted: bool = False) -> shoal.Task:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 8, generator=generator)
    targets = torch.randint(0, 4, (200,), generator=generator)
    return shoal.Task(
        model=Paced,
        loss=_weighted_loss if weighted else F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(inputs, targets),
        weight=(lambda batch: float((batch[1] + 1).sum())) if weighted else None,
        batch_size=batch_size,
        accumulate=accumulate,
        epochs=100,
        max_steps=steps,
    )
