"""One process: the plain torch loop, with nothing in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.errors import SpecError
from shoal.feed.parts import Part
from shoal.model.loss_parts import LossParts
from shoal.model.optimizer.state import load_named_state, named_state
from shoal.model.replica import Replica
from shoal.step.compute import DeferredSums, EagerCompute, Sums, check_weight, compute_of
from shoal.step.device_scale import looks_itself
from shoal.step.flat_update import FlatUpdate
from shoal.step.half_weights import HalfWeights, half_weights
from shoal.step.offloaded import OffloadedOptimizer
from shoal.step.unasked import UnaskedSteps
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Commit, Fill, Setting, StepResult, WholeModel, step_result

if TYPE_CHECKING:
    from shoal.strategies.data.captured import CapturedSteps


@dataclass(frozen=True)
class OpenStep:
    """A step that a GPU may still be at."""

    found: Sequence[DeferredSums]
    stop: bool
    names: LossParts
    facts: Mapping[str, Any]

    @property
    def is_known(self) -> bool:
        """Never: asking a GPU costs as much as it would save."""
        return False

    def result(self) -> StepResult:
        """Wait for this step, and for no later one."""
        by_part = [own.resolve() for own in self.found]
        sums = sum(by_part, start=Sums())
        counts = [int(part.samples) for part in by_part]
        result = step_result(sums, stop=self.stop, counts=counts, names=self.names.names)
        return replace(result, facts=self.facts) if self.facts else result


class SingleProcess(WholeModel):
    """What a hand-written loop does, and what every other strategy is compared with."""

    def __init__(self, *, may_lack_samples: bool = False) -> None:
        """`may_lack_samples`: this process is one of several, whose part of a small batch may be nothing."""
        self._may_lack_samples = may_lack_samples

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._compute = compute_of(replica)
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
        # What comes next depends on what is found there; else a GPU is not waited for in a step.
        # In fp16 a step can look at gradients itself, but for how many of them half precision is too small.
        is_unasked = replica.form.graph or self._can_be_unasked(replica)
        looks = may_skip or self._wants_closure
        looks = looks or (replica.precision.scales and not (is_unasked and replica.precision.kind == "fp16"))
        self._runs_ahead = replica.device != "cpu" and not looks

        if isinstance(self._compute, EagerCompute) and (replica.device != "cpu" or replica.form.flat_update):
            self._compute.halves = half_weights(replica)
            if replica.form.flat_update:
                self._update.flat = self._flat_update(replica, self._compute.halves)
        self._offloaded = OffloadedOptimizer(replica) if replica.form.offload == "optimizer" else None
        self._update.offloaded = self._offloaded
        self._facts: Mapping[str, Any] = {}
        """What the run's results say besides."""
        if self._offloaded is not None:
            self._facts = {"offloaded_bytes": self._offloaded.offloaded_bytes}
        self._captured: CapturedSteps | None = None
        self._unasked: UnaskedSteps | None = None
        if replica.form.graph:
            self._captured = self._captures(replica)
        elif self._runs_ahead and replica.precision.scales:
            assert isinstance(self._compute, EagerCompute)
            self._unasked = UnaskedSteps(replica, self._compute, self._update)

    def _can_be_unasked(self, replica: Replica) -> bool:
        """Whether steps that may be skipped can be taken as they are without the host, and without keeping all
        that they change beside it."""
        groups = replica.optimizer.param_groups
        return (
            looks_itself(replica.optimizer)
            and not any(group.get("dampening") for group in groups)
            and not self._sparse
            and not self._may_lack_samples
            and replica.form.offload == "none"
        )

    def _flat_update(self, replica: Replica, halves: HalfWeights | None) -> FlatUpdate:
        if halves is None or replica.task.accumulate > 1:
            raise SpecError(
                "flat_update: gradients in half precision are used as they are where a step has one pass through "
                "linear layers; leave out skip_loss_below and accumulate, or flat_update."
            )
        halves.flat = FlatUpdate(replica, halves.params, halves.dtype)
        return halves.flat

    def _captures(self, replica: Replica) -> CapturedSteps:
        from shoal.strategies.data.captured import CapturedSteps, why_not_capturable

        if why := why_not_capturable(replica.optimizer):
            raise SpecError(f"graph: a captured step is replayed without the host, but {why}; leave graph out.")
        if not self._runs_ahead or self._sparse:
            raise SpecError(
                f"graph: {type(replica.optimizer).__name__}, skip_loss_below or sparse gradients must be looked "
                "at in every step, but a captured step is replayed; leave graph out."
            )
        return CapturedSteps(replica, self._update)

    def take(self, work: Work) -> Commit:
        return self._take_ahead(work) if self._runs_ahead else self._take_now(work)

    def _take_ahead(self, work: Work) -> Commit:
        """All of a step is asked of the GPU; what it came to is known when the GPU has come to it."""
        names = self._replica.loss_parts
        if self._unasked is not None:
            (part,) = self._begun(work).parts
            return OpenStep([self._unasked.take(work, part)], work.stop, names, self._facts)
        if self._captured is None:
            found = [self._compute.run(work, part) for part in self._begun(work).parts]
            self._finish(work, found)
            return OpenStep(found, work.stop, names, self._facts)
        (part,) = work.parts

        def run_plain(loaded: Part) -> DeferredSums:
            own = self._compute.run(self._begun(work), loaded)
            self._finish(work, [own])
            return own

        return OpenStep([self._captured.take(work, part, run_plain)], work.stop, names, self._facts)

    def _begun(self, work: Work) -> Work:
        for param in self._params:
            param.grad = None
        if self._offloaded is not None:
            self._offloaded.begin()
        return work

    def _finish(self, work: Work, found: Sequence[DeferredSums]) -> None:
        """The update that follows from gradients."""
        weight = sum(own.weight for own in found)
        if not weight and self._may_lack_samples:
            return
        check_weight(work, Sums(weight=weight))
        self._make_dense()
        if self._is_fit(work, weight):
            self._update.step(self._params)

    def _take_now(self, work: Work) -> StepResult:
        first: Sums | None = None
        counts: list[int] = []
        is_taken = True

        def evaluate() -> float:
            nonlocal first, counts, is_taken
            by_part = self._gradients(work)
            is_taken = self._is_fit(work, sum(part.weight for part in by_part))
            if is_taken and self._wants_closure:
                self._update.clip(self._params)
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
                self._update.step(self._params)
        assert first is not None
        if not first.weight + first.skipped:
            return StepResult(loss=math.nan, weight=0.0, stop=work.stop, counts=tuple(counts))
        result = step_result(first, stop=work.stop, counts=counts, names=self._replica.loss_parts.names)
        return replace(result, facts=self._facts) if self._facts else result

    def _gradients(self, work: Work) -> list[Sums]:
        found = []
        for part in self._begun(work).parts:
            buffers = [buffer.clone() for buffer in self._buffers]
            found.append(self._compute.run(work, part))
            if self._buffers and not found[-1].resolve().weight:  # a part that is skipped leaves no trace
                torch._foreach_copy_(self._buffers, buffers)
        by_part = [own.resolve() for own in found]
        sums = sum(by_part, start=Sums())
        if not self._may_lack_samples:
            check_weight(work, sums)
        self._make_dense()
        return by_part

    def _make_dense(self) -> None:
        for weights in self._sparse:  # fused kernels and clipping want dense ones
            if weights.grad is not None:
                weights.grad = weights.grad.to_dense()

    def _is_fit(self, work: Work, weight: float) -> bool:
        """Make gradients those of the mean; whether they are fit for a step."""
        named = ((name, param.grad) for name, param in self._replica.trained.items())
        gradients = [param.grad for param in self._params if param.grad is not None]
        return self._update.scale_and_check(work, weight, gradients, named)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, 0)
        return table

    def snapshot(self) -> dict[str, torch.Tensor]:
        if self._offloaded is not None:
            self._offloaded.settle()
        return named_state(self._replica)

    def close(self) -> None:
        """Nothing is shared."""
