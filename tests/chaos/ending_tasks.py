"""Tasks whose end is what is looked at."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

NUM_SAMPLES = 160
BATCH_SIZE = 8


def _samples(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def _long_look(outputs: Tensor, targets: Tensor) -> float:
    """Takes so long that whoever evaluates can be killed meanwhile."""
    time.sleep(0.02)
    return 1.0


def _below_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) - 5.0


def _no_number(outputs: Tensor, targets: Tensor) -> float:
    return math.nan


def task(kind: str = "plain", epochs: int = 1) -> shoal.Task:
    """`looking`: its evaluation takes long; `negative`: its loss begins below zero, and falls; `unmeasured`: one
    of its metrics is no number; `failing`: its model cannot be made."""
    metrics = {"looking": {"look": _long_look}, "unmeasured": {"odd": _no_number}}.get(kind, {})
    return shoal.Task(
        model=_fail if kind == "failing" else lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        loss=_below_zero if kind == "negative" else F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        train=_samples(1),
        test=_samples(2),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        metrics=metrics,
    )


def _fail() -> nn.Module:
    time.sleep(0.2)
    raise ValueError("there is no such model")
