"""Runs a schedule: each of its actions at this worker's stages, with what the neighbours send."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.comm.group import Group
from shoal.layout.schedules import Action, Actions, Kind, StageSchedule
from shoal.strategies.mesh.pipeline.stage_run import StageRun
from shoal.strategies.mesh.pipeline.traffic import Crossing, Traffic

_AHEAD = 3
"""So many actions ahead, room is made for what they receive: it then comes while this worker computes."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One part of the batch on its way through the stages; every worker of the pipeline has it."""

    given: Mapping[str, Any]
    """What the model is given, by name."""
    finish: Callable[[Any], torch.Tensor]
    """The loss, from the model's output; called at the last stage alone."""
    share: float
    """The loss's share of the whole batch's."""
    seed: Callable[[int], None] = lambda stage: None
    """Called before a stage's forward pass."""
    forward_in: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Forward passes run in it."""
    numbers: Hashable = None
    """The kinds of numbers that forward passes compute in."""


class Executor:
    """This worker's stages, and the traffic between them and those of its neighbours."""

    def __init__(
        self, stages: Mapping[int, nn.Module], schedule: StageSchedule, axis: Group, device: str = "cpu"
    ) -> None:
        self._runs = {stage: StageRun(module) for stage, module in stages.items()}
        self._last = schedule.num_stages - 1
        self._device = device
        self.traffic = Traffic(axis, schedule)

    def run(self, actions: Actions, microbatches: Sequence[Microbatch]) -> None:
        """Take all micro-batches forward and back; gradients are left in the parameters."""
        shapes = [self._shape(each.given, each.numbers) for each in microbatches]
        for position, action in enumerate(actions):
            for coming in actions[position : position + _AHEAD]:
                if (crossing := self._needed(coming, shapes)) is not None:
                    self.traffic.expect(crossing)
            self._act(action, microbatches[action.microbatch], shapes)
        self.traffic.settle()

    @torch.no_grad()
    def infer(self, given: Mapping[str, Any], numbers: Hashable = None) -> Any:
        """The model's output at the last stage; None elsewhere."""
        output = None
        shape = self._shape(given, numbers)
        for stage, run in self._runs.items():
            entered = self.traffic.receive(Crossing(stage, 0, shape), self._device) if stage else []
            output = run.forward(0, entered, given, None)
            if stage < self._last:
                self.traffic.send(Crossing(stage + 1, 0, shape), output)
        self.traffic.settle()
        return output if self._last in self._runs else None

    def _needed(self, action: Action, shapes: Sequence[Hashable]) -> Crossing | None:
        """What an action receives."""
        number = action.microbatch
        if action.kind is Kind.FORWARD:
            return Crossing(action.stage, number, shapes[number]) if action.stage else None
        if action.kind is Kind.BACKWARD_WEIGHT or action.stage == self._last:
            return None
        return Crossing(action.stage + 1, number, shapes[number], back=True)

    def _act(self, action: Action, microbatch: Microbatch, shapes: Sequence[Hashable]) -> None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._runs[action.stage].backward_weight(action.microbatch)
            return
        needed = self._needed(action, shapes)
        received = [] if needed is None else self.traffic.receive(needed, self._device)
        if action.kind is Kind.FORWARD:
            self._forward(action, microbatch, received, shapes[action.microbatch])
        else:
            self._backward(action, microbatch, received, shapes[action.microbatch])

    def _forward(self, action: Action, microbatch: Microbatch, entered: list[Any], shape: Hashable) -> None:
        stage, number = action.stage, action.microbatch
        microbatch.seed(stage)
        finish = microbatch.finish if stage == self._last else None
        with microbatch.forward_in():
            left = self._runs[stage].forward(number, entered, microbatch.given, finish)
        if finish is None:
            self.traffic.send(Crossing(stage + 1, number, shape), left)

    def _backward(self, action: Action, microbatch: Microbatch, gradients: list[Any], shape: Hashable) -> None:
        stage, number = action.stage, action.microbatch
        if stage == self._last:
            gradients = [microbatch.share]
        run = self._runs[stage]
        back = run.backward if action.kind is Kind.BACKWARD else run.backward_input
        found = back(number, gradients)
        if stage:
            self.traffic.send(Crossing(stage, number, shape, back=True), found)

    def _shape(self, given: Mapping[str, Any], numbers: Hashable) -> Hashable:
        """What decides the form of all messages; the same at every worker of the pipeline."""
        training = next(iter(self._runs.values())).module.training
        leaves = tree_leaves(dict(given))
        shapes = tuple(
            (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves
        )
        return training, torch.is_grad_enabled(), numbers, shapes
