"""Forward and backward for one slot: the same bits whoever runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import Diverged, TaskError
from shoal.ledger.order import mix
from shoal.strategies.base import Part, Work
from shoal.strategies.replica import Replica, call_model


def seed_slot(work: Work, slot: int, device: str) -> None:
    """Key this process's random numbers to the slot, not to the process."""
    key = mix(work.seed, work.step, slot) >> 1
    torch.default_generator.manual_seed(key)
    if device != "cpu":
        torch.cuda.manual_seed(key)


def task_loss(replica: Replica, batch: Any) -> torch.Tensor:
    """The task's loss on a batch, checked to be one number."""
    task = replica.task
    if task.objective is not None:
        loss = task.objective(replica.module, batch)
    else:
        inputs, target = split_batch(batch)
        assert task.loss is not None
        loss = task.loss(call_model(replica.module, inputs), target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TaskError(
            f"Task: the loss must be one number (a tensor with a single element), found {found}; "
            "take its mean over the batch, for instance with reduction='mean'."
        )
    return loss


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A batch's inputs and target."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise TaskError(
            f"Task: a batch must be (inputs, target), found {found}; put several inputs into a tuple or dict, "
            "set collate, or use objective= in place of loss=."
        )
    return batch[0], batch[1]


Backward = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Runs the backward pass from a loss, weighted by the second argument."""


def backward_part(
    replica: Replica, work: Work, part: Part, backward: Backward = torch.Tensor.backward
) -> tuple[float, float]:
    """Backward over a slot's batches; gradients go to `p.grad`. Returns (sum of weight * loss, weight).

    Each loss is weighted by its share of the whole batch where that is known beforehand, else by its bare
    weight; whoever sums the slots then divides by the total.
    """
    seed_slot(work, part.slot, replica.device)
    loss_sum = weight_sum = 0.0
    for batch, weight in part.load():
        if not weight:  # padding alone: it counts nothing, and its mean is not a number
            continue
        loss = task_loss(replica, batch)
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged(
                f"Task: the loss is {value} at step {work.step} (slot {part.slot}); lower the learning rate, "
                "set clip_norm, or look for bad samples in this batch."
            )
        share = weight if part.total_weight is None else weight / part.total_weight
        backward(loss, None if share == 1.0 else torch.full_like(loss, share))
        loss_sum += value * weight
        weight_sum += weight
    return loss_sum, weight_sum


def check_weight(work: Work, weight: float) -> None:
    """A mean needs something to be the mean of."""
    if not weight > 0:
        raise TaskError(
            f"Task: the weights of the batch of step {work.step} add up to {weight:g}, so it has no mean; let "
            "weight(batch) return what counts, and leave samples without any out of the data."
        )
