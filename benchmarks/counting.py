"""A second opinion on what was applied: one weight per sample that counts, beside the model that is measured.

Plain SGD adds exactly one to the weight of each sample of a batch, whatever else the batch does to the model: the
gradient is one over the batch's size and the learning rate that size, both powers of two. Nothing of the run's own
book-keeping is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.spec import Task

COUNTS = "counts"
"""The parameter's name."""


class Counting(nn.Module):
    """A model, and how often each sample was applied to it."""

    def __init__(self, net: nn.Module, samples: int) -> None:
        super().__init__()
        self.net = net
        self.counts = nn.Parameter(torch.zeros(samples))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs)
        return output


def counting(task: Task) -> Task:
    """The same task, whose model also counts."""
    plain_model, plain_loss, plain_optimizer = task.model, task.loss, task.optimizer
    assert plain_loss is not None and callable(task.train)
    made: TensorDataset = task.train()
    inputs, target = made.tensors
    size = float(task.batch_size)

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Counting)
        each = model.counts[batch[2]].mean()
        return plain_loss(model(batch[0]), batch[1]) + (each.detach() - each)

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        counts, *others = params  # A module names its own parameters before those of the modules inside it.
        found = plain_optimizer(others)
        found.add_param_group({"params": [counts], "lr": size, "momentum": 0.0, "weight_decay": 0.0})
        return found

    return replace(
        task,
        model=lambda: Counting(plain_model(), len(made)),
        loss=None,
        objective=objective,
        optimizer=optimizer,
        train=TensorDataset(inputs, target, torch.arange(len(made))),
    )


def times_applied(model: Mapping[str, Any]) -> list[float] | None:
    """By sample, from the weights; None where the model does not count."""
    return model[COUNTS].tolist() if COUNTS in model else None
