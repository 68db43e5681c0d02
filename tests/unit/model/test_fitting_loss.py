"""A loss with class weights takes what a model in double precision gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.model.replica import Replica
from shoal.spec import Task
from shoal.step.compute import task_loss

WEIGHT = torch.tensor([1.0, 3.0])


def task(loss: Any) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[(torch.ones(4), 0)],
    )


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHT),
        partial(F.cross_entropy, weight=WEIGHT),
        partial(nn.CrossEntropyLoss(weight=WEIGHT)),
    ],
    ids=["module", "partial", "partial of a module"],
)
def test_weights_follow_the_models_numbers(loss: Any) -> None:
    given = task(loss)
    inputs, target = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 1])
    wide = Replica(given, numerics="float64")
    found = task_loss(wide, (inputs, target)).loss
    assert found.dtype == torch.float64
    assert torch.equal(found, F.cross_entropy(wide.module(inputs), target, weight=WEIGHT.double()))
    assert WEIGHT.dtype == torch.float32 and given.loss is loss, "the task itself is as it was"
    plain = Replica(given)
    assert plain.task is given and task_loss(plain, (inputs.float(), target)).loss.dtype == torch.float32
