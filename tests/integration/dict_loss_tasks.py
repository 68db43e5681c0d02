"""A loss that says what it is made of."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shoal

CHANCE = torch.Generator().manual_seed(8)
INPUTS, TARGETS = torch.randn(48, 6, generator=CHANCE), torch.randint(0, 3, (48,), generator=CHANCE)
SHARE = 0.1


def _loss(output: Any, target: Any) -> dict[str, Any]:
    ce, size = functional.cross_entropy(output, target), output.square().mean()
    return {"loss": ce + SHARE * size, "ce": ce, "size": size}


def task(
    objective: bool = False,
    weighted: bool = False,
    accumulate: int = 1,
    skip: float | None = None,
    epochs: int = 2,
) -> shoal.Task:
    how: dict[str, Any] = {"loss": _loss}
    if objective:
        how = {"objective": lambda model, batch: _loss(model(batch[0]), batch[1])}
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
        weight=(lambda batch: float(1 + batch[1].sum())) if weighted else None,
        train=TensorDataset(INPUTS, TARGETS),
        test=TensorDataset(INPUTS[:20], TARGETS[:20]),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=epochs,
        accumulate=accumulate,
        skip_loss_below=skip,
        **how,
    )
