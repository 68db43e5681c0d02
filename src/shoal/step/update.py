"""From gradients that are added up to what an optimizer may take: scaled, looked at, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from shoal.model.half_range import Seen
from shoal.model.replica import Replica
from shoal.step.clipping import clip_together
from shoal.step.flat_update import FlatUpdate
from shoal.step.offloaded import OffloadedOptimizer
from shoal.step.work import Work

SumOverAll = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a small tensor over all workers, in place."""
Named = Iterable[tuple[str, torch.Tensor | None]]


class Update:
    """What every worker does with its gradients before its optimizer steps.

    Where the model is cut, `sum_over_all` brings together what each found in its own part; else all have the same
    gradients, and come to the same.
    """

    def __init__(self, replica: Replica, clip_norm: float | None, sum_over_all: SumOverAll | None = None) -> None:
        self._replica = replica
        self._clip_norm = clip_norm
        self._sum_over_all = sum_over_all
        self.flat: FlatUpdate | None = None
        """What updates a flat shard in one go, where something does."""
        self.offloaded: OffloadedOptimizer | None = None
        """Who takes the optimizer's steps, where the host has its state."""

    def scale_and_check(
        self, work: Work, weight: float, gradients: Sequence[torch.Tensor], counted: Named
    ) -> bool:
        """Make gradients those of the mean loss; whether all are numbers, so that the step may be taken.

        `counted`: those that no other worker counts, by name.
        """
        precision = self._replica.precision
        factor = 1.0 if work.parts[0].total_weight is not None or not weight else 1 / weight
        factor /= precision.scale
        if precision.scales:
            seen = precision.measure(work.step, counted)
            if self._sum_over_all is not None:
                values = self._sum_over_all(torch.tensor(seen.values, dtype=torch.float64))
                seen = Seen.of(values.tolist())
            if not precision.conclude(work.step, seen):
                return False
        if factor != 1.0 and gradients:
            torch._foreach_mul_(list(gradients), factor)
        if self.flat is not None:
            self.flat.scale = factor
        return True

    def step(self, updated: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of these parameters, and let the optimizer take its step."""
        if self.flat is not None and self.flat.is_filled:
            self.flat.step(updated, self._clip_norm)
            return
        self.clip(updated)
        (self.offloaded or self._replica.optimizer).step()

    def clip(self, updated: Sequence[torch.Tensor], counted: Iterable[torch.Tensor] | None = None) -> None:
        """Clip the gradients of these parameters by the norm of the whole model's.

        `counted`: gradients that no other worker counts; None where every worker has them all.
        """
        if self._clip_norm is None:
            return
        if self._sum_over_all is None:
            torch.nn.utils.clip_grad_norm_(updated, self._clip_norm)
            return
        gradients = [param.grad for param in updated if param.grad is not None]
        clip_together(gradients, counted or (), self._clip_norm, self._sum_over_all)
