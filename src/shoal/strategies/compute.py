"""A slot's forward and backward passes behind one contract: whoever runs them, the same bits.

`EagerCompute` runs the task's own code as it is. What compiles it, or captures it on a device, would be another
`Compute`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.feed.parts import Part
from shoal.strategies.base import Work
from shoal.strategies.gradients import Backward, Sums, check_finite, seed_slot, task_loss
from shoal.strategies.replica import Replica


class DeferredSums:
    """What a slot's batches come to. A device may still be at it: only `resolve` waits."""

    def __init__(self, work: Work, part: Part) -> None:
        self._work = work
        self._part = part
        self._losses: list[torch.Tensor] = []
        self._weights: list[float] = []
        self._known = Sums()

    def add(self, known: Sums) -> None:
        """This much is known."""
        self._known += known

    def defer(self, loss: torch.Tensor, weight: float) -> None:
        """A batch of this weight has a loss that nobody has looked at."""
        self._losses.append(loss.detach())
        self._weights.append(weight)

    def resolve(self) -> Sums:
        """Wait for the device, and know all of it; `Diverged` where a loss is no number."""
        values = torch.stack([loss.reshape(()) for loss in self._losses]).tolist() if self._losses else []
        for value, weight in zip(values, self._weights, strict=True):
            check_finite(value, self._work, self._part)
            self._known += Sums(value * weight, weight)
        self._losses, self._weights = [], []
        return self._known


class Compute(Protocol):
    """Runs a slot's passes."""

    def run(self, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> DeferredSums:
        """Backward over the slot's batches; gradients go to `p.grad`, or where `backward` leads them.

        Each loss is weighted by its share of the whole batch where that is known beforehand, else by its bare
        weight; whoever sums the slots then divides by the total, and by the scale of the replica's precision.
        """


class EagerCompute:
    """Batch by batch, as Python says."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def run(self, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> DeferredSums:
        replica, found = self._replica, DeferredSums(work, part)
        seed_slot(work, part.slot, replica.device)
        learnt = replica.task.skip_loss_below
        # A device is not waited for, unless what comes next depends on the loss.
        looks_at_once = learnt is not None or replica.device == "cpu"
        for batch, weight, samples in part.load():
            found.add(Sums(samples=samples))
            if not weight:  # padding alone: it counts nothing, and its mean is not a number
                continue
            loss = task_loss(replica, batch, work.step)
            if looks_at_once:
                value = loss.item()
                check_finite(value, work, part)
                if learnt is not None and value < learnt:
                    found.add(Sums(value * weight, 0.0, weight, 1.0))
                    continue
                found.add(Sums(value * weight, weight))
            else:
                found.defer(loss, weight)
            share = weight if part.total_weight is None else weight / part.total_weight
            share *= replica.precision.scale
            backward(loss, None if share == 1.0 else torch.full_like(loss, share))
        return found


def backward_part(replica: Replica, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> Sums:
    """A slot's passes, and what they come to, now."""
    return EagerCompute(replica).run(work, part, backward).resolve()
