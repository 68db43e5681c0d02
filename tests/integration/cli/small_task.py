"""A task that is trained in an instant: which of two clouds does a point belong to?"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

NUM_TRAIN, NUM_TEST = 200, 90


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    cloud = torch.randint(0, 2, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator) + 2 * cloud[:, None], cloud)


def task(width: int = 8) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=points(NUM_TRAIN, 1),
        test=points(NUM_TEST, 2),
        batch_size=16,
        epochs=2,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
