"""The blocks of a model as the steps of its forward pass, where torch.fx cannot follow it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.step.objective import inputs_of
from shoal.strategies.cut.block_line import BlockLine
from shoal.strategies.cut.stage_run import StageCall
from shoal.strategies.cut.tracing import bind
from shoal.strategies.layer.graph import GraphNode
from shoal.strategies.layer.placement import assign, check_homes, spread
from shoal.strategies.layer.steps import Steps, follow
from shoal.strategies.mesh.tensor.recording import sample_of


def find_steps(replica: Replica, placed: Collection[str]) -> Mapping[bool, Steps]:
    """What the model does in training, and otherwise."""
    try:
        return {mode: follow(replica.module, placed, training=mode) for mode in (True, False)}
    except SpecError:
        line = None
        if replica.sample is not None:
            line = BlockLine.of(replica.module, inputs_of(replica.task, sample_of(replica)))
        if line is None:
            raise
        return dict.fromkeys((True, False), BlockSteps(line))


def place_steps(traced: Steps, wanted: Mapping[str, int], count: int, replica: Replica) -> dict[str, int]:
    """By step: its worker, as the user wants it, or by branches; refuses what so many workers cannot compute."""
    homes = wanted or spread(traced.nodes, count)
    check_homes(traced.nodes, homes, count)
    workers = assign(traced.nodes, homes)
    if isinstance(traced, BlockSteps):
        traced.check(workers, replica)
    return workers


@dataclass(frozen=True)
class BlockSteps:
    """A line of blocks, each of which reads the one before it, and what follows them."""

    line: BlockLine

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        names = self.line.link_names
        return tuple(
            GraphNode(
                name=name,
                inputs=tuple(names[max(0, link - 1) : link]),
                module=name if name in self.line.parts else "",
                size=sum(tensor.numel() for tensor in self._params(link)),
                has_weights=any(tensor.dim() > 1 for tensor in self._params(link)),
            )
            for link, name in enumerate(names)
        )

    @property
    def output(self) -> str:
        return self.line.link_names[-1]

    def given(self, inputs: Any) -> dict[str, Any]:
        return {**self.line.besides, **bind(self.line.signature, inputs)}

    def stage(self, module: nn.Module, steps: Sequence[str], reads: Sequence[str]) -> StageCall:
        first = self.line.link_names.index(steps[0])
        stage = self.line.stage(range(first, first + len(steps)))

        copies = stage.copies_of(module)

        def run(carried: Sequence[Any], given: Mapping[str, Any]) -> Any:
            for copy, original in copies:
                copy.training = original.training
            return stage(carried, given)

        return run

    def state_of(self, module: nn.Module, step: str) -> list[torch.Tensor]:
        return list(self.line.state_of(self.line.link_names.index(step)))

    def check(self, workers: Mapping[str, int], replica: Replica) -> None:
        """Refuse a model that does not compute the same when each worker has its blocks."""
        counts = [len(list(own)) for _, own in groupby(self.line.link_names, workers.__getitem__)]
        inputs = inputs_of(replica.task, sample_of(replica))
        self.line.check(self.line.cut(counts), counts, inputs, who="layer", device=replica.device)

    def _params(self, link: int) -> list[torch.Tensor]:
        return [tensor for tensor in self.line.state_of(link) if isinstance(tensor, nn.Parameter)]
