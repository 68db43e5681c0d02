"""What inspection finds out about a task's loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.datasets.given import numbered
from shoal.roles.inspection import LossProbe
from shoal.spec import Task


class Rounding(nn.Linear):
    """Computes in float32 whatever it gets, as some normalisations do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float().to(input.dtype)


@pytest.mark.parametrize(("kind", "narrows"), [(nn.Linear, False), (Rounding, True)])
def test_whether_parts_are_computed_in_fewer_digits(kind: type[nn.Linear], narrows: bool) -> None:
    """Data that has more digits than it is given with does not count."""
    inputs = np.linspace(0.0, 1.0, 48).reshape(16, 3)
    task = numbered(
        Task(
            model=lambda: nn.Sequential(kind(3, 2), nn.Dropout(0.5)),
            loss=F.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            train=(inputs, np.arange(16) % 2),
            batch_size=8,
        )
    )
    probe = LossProbe(task, task.dataset("train"), "float64")
    assert probe.narrows() is narrows
    assert not probe.is_random()
