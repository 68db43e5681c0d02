"""A task that every strategy can train: a chain of layers that can be cut by depth and by width."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(40, 6, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (40,), generator=GENERATOR)
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def task(optimizer: str = "momentum", steps: int = 6, dropout: float = 0.0) -> shoal.Task:
    def model() -> nn.Module:
        # Dropout stands where every worker has the same of it.
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
        )

    return shoal.Task(
        model=model,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step),
        train=TensorDataset(INPUTS, TARGETS),
        test=TensorDataset(INPUTS[:20], TARGETS[:20]),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=100,
        max_steps=steps,
    )
