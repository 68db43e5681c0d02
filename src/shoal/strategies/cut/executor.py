"""Runs a schedule: each of its actions at this worker's stages, with what those of other workers send.

A stage makes one result, a tuple of values, from results of other stages and from what the model is given. Each is
a piece of autograd's graph of its own, so that gradients leave for other workers as soon as they are there, and
not when all is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shoal.comm.group import Group
from shoal.layout.schedules import Action, Actions, Kind, StageSchedule
from shoal.strategies.cut.stage_run import Gradient, StageRun
from shoal.strategies.cut.traffic import Crossing, Traffic

_AHEAD = 3
"""So many actions ahead, room is made for what they receive: it then comes while this worker computes."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One part of the batch on its way through the stages; every worker has it."""

    given: Mapping[str, Any]
    """What the model is given, by name."""
    finish: Callable[[Any], Any] = lambda result: result
    """The loss, from what the stage makes that ends here; called there alone."""
    share: float = 1.0
    """The loss's share of the whole batch's."""
    seed: Callable[[int], None] = lambda stage: None
    """Called before a stage's forward pass."""
    forward_in: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Forward passes run in it."""
    shape: Hashable = None
    """What decides the form of all messages, where anything does; the same at every worker."""


class Executor:
    """This worker's stages, and the traffic between them and those of other workers."""

    def __init__(
        self,
        stages: Mapping[int, StageRun],
        schedule: StageSchedule,
        group: Group,
        *,
        reads: Sequence[Sequence[int]] | None = None,
        end: int | None = None,
        returns: bool = True,
        device: str = "cpu",
    ) -> None:
        """`reads`: by stage, those whose results it reads; else each reads that of the one before it. `end`: the
        stage of whose result a loss is made here, if this worker has it; else the last. `returns`: whether
        gradients go back to the workers that results came from."""
        self._runs = stages
        self._worker_of = schedule.worker_of
        self._worker = group.index
        in_line = [range(max(0, stage - 1), stage) for stage in range(schedule.num_stages)]
        self._reads: Sequence[Sequence[int]] = in_line if reads is None else reads
        self._end = schedule.num_stages - 1 if end is None else end
        self._returns = returns
        self._device = device
        self.traffic = Traffic(group, schedule)
        self._readers: dict[int, list[int]] = {}
        """By stage whose result is read here: the stages here that read it, in order."""
        self._afar: dict[int, set[int]] = {}
        """By stage: other workers that read its result."""
        for reader, sources in enumerate(self._reads):
            for source in sources:
                if self._worker_of(reader) == self._worker:
                    self._readers.setdefault(source, []).append(reader)
                else:
                    self._afar.setdefault(source, set()).add(self._worker_of(reader))
        self._results: dict[tuple[int, int], Any] = {}
        """By stage and micro-batch: what stages here have yet to read."""
        self._found: dict[tuple[int, int], Sequence[Gradient]] = {}
        """By stage and micro-batch: the gradients of its result that stages here have found so far."""

    def run(self, actions: Actions, microbatches: Sequence[Microbatch]) -> None:
        """Take all micro-batches forward and back; gradients are left in the parameters."""
        for position, action in enumerate(actions):
            for coming in actions[position : position + _AHEAD]:
                for crossing in self._awaited(coming, microbatches[coming.microbatch].shape):
                    self.traffic.expect(crossing)
            microbatch = microbatches[action.microbatch]
            match action.kind:
                case Kind.FORWARD:
                    self._forward(action.stage, action.microbatch, microbatch)
                case Kind.BACKWARD_WEIGHT:
                    self._runs[action.stage].backward_weight(action.microbatch)
                case _:
                    self._backward(action, microbatch)
        self.traffic.settle()

    @torch.no_grad()
    def infer(self, given: Mapping[str, Any], shape: Hashable = None) -> Any:
        """What the stage makes that ends here; None where it is another worker's."""
        output = None
        microbatch = Microbatch(given=given, shape=shape)
        for stage in self._runs:
            made = self._forward(stage, 0, microbatch)
            if stage == self._end:
                output = made
        self.traffic.settle()
        return output

    def _awaited(self, action: Action, shape: Hashable) -> list[Crossing]:
        """What an action receives."""
        stage, number = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [
                Crossing(source, self._worker, number, shape)
                for source in self._reads[stage]
                if self._worker_of(source) != self._worker and self._readers[source][0] == stage
            ]
        if action.kind is Kind.BACKWARD_WEIGHT or stage == self._end or not self._returns:
            return []
        return [Crossing(stage, worker, number, shape, back=True) for worker in self._afar.get(stage, ())]

    def _forward(self, stage: int, number: int, microbatch: Microbatch) -> Any:
        entered = [self._entering(source, stage, number, microbatch.shape) for source in self._reads[stage]]
        microbatch.seed(stage)

        def finish(result: Any) -> Any:
            self._pass_on(stage, number, result, microbatch.shape)
            return microbatch.finish(result) if stage == self._end else result

        with microbatch.forward_in():
            return self._runs[stage].forward(number, entered, microbatch.given, finish)

    def _entering(self, source: int, stage: int, number: int, shape: Hashable) -> Any:
        """A result that a stage reads, as the beginning of a graph of its own."""
        if (source, number) not in self._results:
            crossing = Crossing(source, self._worker, number, shape)
            self._results[source, number] = self.traffic.receive(crossing, self._device)
        result = self._results[source, number]
        if stage == self._readers[source][-1]:
            del self._results[source, number]
        return tree_map_only(torch.Tensor, _begin_history, result)

    def _pass_on(self, stage: int, number: int, result: Any, shape: Hashable) -> None:
        """Keep a result for stages here, and send it to other workers at once."""
        if stage in self._readers:
            self._results[stage, number] = result
        for worker in sorted(self._afar.get(stage, ())):
            leaving = result if self._returns else tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            self.traffic.send(Crossing(stage, worker, number, shape), leaving)

    def _backward(self, action: Action, microbatch: Microbatch) -> None:
        stage, number, shape = action.stage, action.microbatch, microbatch.shape
        run = self._runs[stage]
        gradients: Sequence[Gradient] = [microbatch.share]
        if stage != self._end:
            gradients = self._gradients(stage, number, shape)
        back = run.backward if action.kind is Kind.BACKWARD else run.backward_input
        for source, found in zip(self._reads[stage], back(number, gradients), strict=True):
            self._give_back(source, stage, number, found, shape)

    def _gradients(self, stage: int, number: int, shape: Hashable) -> Sequence[Gradient]:
        """Those of a stage's result: what stages here have found, and then what other workers send, in order."""
        count = self._runs[stage].num_left(number)
        total = self._found.pop((stage, number), [None] * count)
        if count and self._returns:
            for worker in sorted(self._afar.get(stage, ())):
                back = Crossing(stage, worker, number, shape, back=True)
                total = _added(total, self.traffic.receive(back, self._device))
        return total

    def _give_back(self, source: int, stage: int, number: int, found: Sequence[Gradient], shape: Hashable) -> None:
        """Add the gradients of a result that a stage has read, and send them to its maker once all here have."""
        key = source, number
        total = self._found[key] = _added(self._found.get(key, [None] * len(found)), found)
        if self._worker_of(source) == self._worker or stage != self._readers[source][0]:
            return  # who reads first goes back last
        del self._found[key]
        if total and self._returns:
            self.traffic.send(Crossing(source, self._worker, number, shape, back=True), total)


def _begin_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same values for another stage, whose gradients stop here."""
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _added(known: Sequence[Gradient], new: Sequence[Gradient]) -> list[Gradient]:
    """The sums; None is no gradient at all, which is not one of zeros: optimizers leave such parameters alone."""
    return [
        more if old is None else old if more is None else old + more for old, more in zip(known, new, strict=True)
    ]
