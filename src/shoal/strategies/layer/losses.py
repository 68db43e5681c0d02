"""The task's loss where a worker has the model's output, or something that stands in for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.errors import Diverged, TaskError
from shoal.strategies.replica import Replica


def loss_of(replica: Replica, output: Any, target: Any, step: int) -> torch.Tensor:
    """The task's loss, checked to be one number."""
    assert replica.task.loss is not None
    with replica.precision.autocast(step):
        loss = replica.task.loss(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TaskError(
            f"Task: the loss must be one number (a tensor with a single element), found {found}; "
            "take its mean over the batch, for instance with reduction='mean'."
        )
    if not math.isfinite(loss):
        raise Diverged(
            f"Task: the loss is {float(loss)} at step {step}; lower the learning rate, set clip_norm, or look for "
            "bad samples in this batch."
        )
    return replica.precision.widened(loss)
