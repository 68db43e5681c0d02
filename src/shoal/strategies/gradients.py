"""Forward and backward for one slot: the same bits whoever runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.errors import Diverged, TaskError
from shoal.feed.parts import Part
from shoal.ledger.order import mix
from shoal.strategies.base import StepResult, Work
from shoal.strategies.replica import Replica, call_model


def seed_slot(work: Work, slot: int, device: str) -> None:
    """Key this process's random numbers to the slot, not to the process."""
    key = mix(work.seed, work.step, slot) >> 1  # 63 bits: torch takes a signed number
    torch.default_generator.manual_seed(key)
    if device != "cpu":
        torch.cuda.manual_seed(key)


def task_loss(replica: Replica, batch: Any, step: int = 0) -> torch.Tensor:
    """The task's loss on a batch, checked to be one number; 0 where it belongs to no step."""
    with replica.precision.autocast(step):
        loss = plain_loss(replica, batch)
    return replica.precision.widened(loss)


def plain_loss(replica: Replica, batch: Any) -> torch.Tensor:
    """The same in the model's own numbers, whatever precision the job asks for."""
    task = replica.task
    if task.objective is not None:
        return check_loss(task.objective(replica.module, batch))
    inputs, target = split_batch(batch)
    assert task.loss is not None
    return check_loss(task.loss(call_model(replica.module, inputs), target))


def check_loss(loss: Any) -> torch.Tensor:
    """A loss must be one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TaskError(
            f"Task: the loss must be one number (a tensor with a single element), found {found}; "
            "take its mean over the batch, for instance with reduction='mean'."
        )
    return loss


def check_finite(value: float, work: Work, part: Part) -> None:
    """A loss that is no number spoils all that follows."""
    if not math.isfinite(value):
        raise Diverged(
            f"Task: the loss is {value} at step {work.step} (slot {part.slot}); lower the learning rate, "
            "set clip_norm, or look for bad samples in this batch."
        )


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


@dataclass(frozen=True)
class Sums:
    """What the batches of one or more slots come to."""

    loss: float = 0.0
    """The sum of weight times loss, also of batches that were skipped."""
    weight: float = 0.0
    """What the batches count together that gave gradients."""
    skipped: float = 0.0
    """What those would have counted that were learnt already, and gave none."""
    skipped_parts: float = 0.0
    """How many these were."""
    samples: float = 0.0
    """How many samples all of them hold."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(mine + theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        """As numbers that can be stored or sent."""
        return self.loss, self.weight, self.skipped, self.skipped_parts, self.samples

    @property
    def mean_loss(self) -> float:
        """The loss over all batches."""
        return self.loss / (self.weight + self.skipped)


def step_result(sums: Sums, *, stop: bool, counts: Sequence[int], save: bool = False) -> StepResult:
    """What a step's sums are told as; `counts`: the samples of each slot."""
    return StepResult(
        loss=sums.mean_loss,
        weight=sums.weight,
        stop=stop,
        save=save,
        skipped=sums.skipped,
        skipped_parts=int(sums.skipped_parts),
        counts=tuple(counts),
    )


def check_weight(work: Work, sums: Sums) -> None:
    """A mean needs something to be the mean of."""
    if not sums.weight + sums.skipped > 0:
        raise TaskError(
            f"Task: the weights of the batch of step {work.step} add up to {sums.weight:g}, so it has no mean; "
            "let weight(batch) return what counts, and leave samples without any out of the data."
        )
