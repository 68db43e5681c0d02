"""A task whose steps are too long: its loss grows without end."""

import torch
from torch import nn

import shoal


def task() -> shoal.Task:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return shoal.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda found, wanted: (found.squeeze(-1) - wanted).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=3.0),
        train=torch.utils.data.TensorDataset(inputs, inputs.sum(1)),
        batch_size=8,
        epochs=100000,
    )
