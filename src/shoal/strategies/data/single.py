"""One process: the plain torch loop, with nothing in between."""

from __future__ import annotations

import math

import torch
from torch import nn

from shoal.model.optimizer.state import load_named_state, named_state
from shoal.model.replica import Replica
from shoal.step.compute import EagerCompute, Sums, check_weight
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult, WholeModel, step_result


class SingleProcess(WholeModel):
    """What a hand-written loop does, and what every other strategy is compared with."""

    def __init__(self, *, may_lack_samples: bool = False) -> None:
        """`may_lack_samples`: this process is one of several, whose part of a small batch may be nothing."""
        self._may_lack_samples = may_lack_samples

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._compute = EagerCompute(replica)
        self._update = Update(replica, setting.clip_norm)
        load_named_state(replica)
        self._wants_closure = isinstance(replica.optimizer, torch.optim.LBFGS)
        self._params = list(replica.trained.values())
        replica.precision.bind(replica.module, report=setting.company.report if setting.world.is_first else None)
        may_skip = replica.task.skip_loss_below is not None
        self._buffers = list(replica.module.buffers()) if may_skip else []
        self._sparse = [
            layer.weight
            for layer in replica.module.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        ]

    def take(self, work: Work) -> StepResult:
        first: Sums | None = None
        counts: list[int] = []
        is_taken = True

        def evaluate() -> float:
            nonlocal first, counts, is_taken
            by_part = self._gradients(work)
            is_taken = self._make_fit(work, sum(part.weight for part in by_part))
            sums = sum(by_part, start=Sums())
            if not sums.weight + sums.skipped:
                first, counts = sums, [int(part.samples) for part in by_part]
                return 0.0
            if first is None:  # the step's loss is the one it began with
                first, counts = sums, [int(part.samples) for part in by_part]
            return sums.mean_loss

        if self._wants_closure:
            self._replica.optimizer.step(torch.enable_grad()(evaluate))
        else:
            evaluate()
            if first is not None and first.weight and is_taken:  # else all of the batch was learnt already
                self._replica.optimizer.step()
        assert first is not None
        if not first.weight + first.skipped:
            return StepResult(loss=math.nan, weight=0.0, stop=work.stop, counts=tuple(counts))
        return step_result(first, stop=work.stop, counts=counts, names=self._replica.loss_parts.names)

    def _gradients(self, work: Work) -> list[Sums]:
        for param in self._params:
            param.grad = None
        found = []
        for part in work.parts:
            buffers = [buffer.clone() for buffer in self._buffers]
            found.append(self._compute.run(work, part))
            if self._buffers and not found[-1].resolve().weight:  # a part that is skipped leaves no trace
                torch._foreach_copy_(self._buffers, buffers)
        by_part = [own.resolve() for own in found]
        sums = sum(by_part, start=Sums())
        if not self._may_lack_samples:
            check_weight(work, sums)
        for weights in self._sparse:  # fused kernels and clipping want dense ones
            if weights.grad is not None:
                weights.grad = weights.grad.to_dense()
        return by_part

    def _make_fit(self, work: Work, weight: float) -> bool:
        """Make gradients those of the mean, and clip them; whether they are fit for a step."""
        named = ((name, param.grad) for name, param in self._replica.trained.items())
        gradients = [param.grad for param in self._params if param.grad is not None]
        is_fit = self._update.scale_and_check(work, weight, gradients, named)
        if is_fit:
            self._update.clip(self._params)
        return is_fit

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, 0)
        return table

    def snapshot(self) -> dict[str, torch.Tensor]:
        return named_state(self._replica)

    def close(self) -> None:
        """Nothing is shared."""
