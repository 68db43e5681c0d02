"""One process: the plain torch loop, with nothing in between."""

from __future__ import annotations

import torch
from torch import nn

from shoal.spec import World
from shoal.strategies.base import Fill, Setting, StepResult, Work
from shoal.strategies.gradients import backward_part, check_weight
from shoal.strategies.optimizer_state import named_state
from shoal.strategies.replica import Replica


class SingleProcess:
    """What a hand-written loop does, and what every other strategy is compared with."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._clip_norm = setting.clip_norm
        self._losses: list[float] = []
        self._wants_closure = isinstance(replica.optimizer, torch.optim.LBFGS)
        self._params = list(replica.trained.values())
        self._sparse = [
            layer.weight
            for layer in replica.module.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        ]

    def step(self, work: Work) -> StepResult:
        sums: tuple[float, float] | None = None

        def evaluate() -> float:
            nonlocal sums
            loss_sum, weight = self._gradients(work)
            if sums is None:  # the step's loss is the one it began with
                sums = loss_sum, weight
            return loss_sum / weight

        if self._wants_closure:
            self._replica.optimizer.step(torch.enable_grad()(evaluate))
        else:
            evaluate()
            self._replica.optimizer.step()
        assert sums is not None
        loss_sum, weight = sums
        self._losses.append(loss_sum / weight)
        return StepResult(loss_sum / weight, weight, work.stop)

    def _gradients(self, work: Work) -> tuple[float, float]:
        for param in self._params:
            param.grad = None
        loss_sum = weight = 0.0
        for part in work.parts:
            part_loss, part_weight = backward_part(self._replica, work, part)
            loss_sum, weight = loss_sum + part_loss, weight + part_weight
        check_weight(work, weight)
        for weights in self._sparse:  # fused kernels and clipping want dense ones
            if weights.grad is not None:
                weights.grad = weights.grad.to_dense()
        if work.parts[0].total_weight is None and weight != 1.0:
            torch._foreach_mul_([p.grad for p in self._params if p.grad is not None], 1 / weight)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip_norm)
        return loss_sum, weight

    def reform(self, world: World) -> int:
        raise AssertionError("one process has no successor")

    def losses(self, last_step: int) -> list[float]:
        return self._losses[:last_step]

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table)
        return table

    def settle(self) -> None:
        """Parameters are already where they should be."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        return named_state(self._replica)

    def close(self) -> None:
        """Nothing is shared."""
