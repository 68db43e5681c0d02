"""Which updates can be captured on a GPU: known without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.model.optimizer.averaging import with_average
from shoal.spec import Task
from shoal.strategies.data.captured import why_not_capturable

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
CASES: list[tuple[Make, str]] = [
    (lambda params: optim.SGD(params, lr=0.1, momentum=0.9), ""),
    (lambda params: optim.AdamW(params), ""),
    (lambda params: optim.RMSprop(params), ""),
    (lambda params: optim.Adagrad(params), "Adagrad computes on the host"),
]


@pytest.mark.parametrize(("make", "why"), CASES)
def test_optimizers_that_compute_on_the_host_are_told(make: Make, why: str) -> None:
    assert why_not_capturable(make([nn.Parameter(torch.zeros(2))])).startswith(why)
    assert bool(why_not_capturable(make([nn.Parameter(torch.zeros(2))]))) == bool(why)


def test_averages_are_told() -> None:
    task = Task(
        model=lambda: nn.Linear(2, 2),
        loss=F.mse_loss,
        optimizer=lambda params: optim.AdamW(params),
        train=TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2)),
        ema=0.9,
    )
    optimizer = with_average(optim.AdamW([nn.Parameter(torch.zeros(2))]), task)
    assert "an average" in why_not_capturable(optimizer)
