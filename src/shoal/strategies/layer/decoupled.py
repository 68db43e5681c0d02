"""Groups of layers that train at the same time: each by its own head, on its predecessor's detached features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.comm.group import Group
from shoal.errors import SpecError
from shoal.ledger.order import mix
from shoal.model.replica import Replica
from shoal.step.compute import split_batch
from shoal.strategies.base import Supply
from shoal.strategies.cut.tracing import in_mode
from shoal.strategies.layer.graph import GraphNode, groups_by_depth
from shoal.strategies.layer.heads import AuxiliaryHead
from shoal.strategies.layer.lines import LayerLine
from shoal.strategies.layer.steps import Steps, Traced, follow
from shoal.strategies.layer.trained_head import TrainedHead


class DecoupledLine(LayerLine):
    """Features go forward, and nothing comes back; the last group's loss is the task's own."""

    returns = False

    def __init__(self, replica: Replica, group: Group, weights: Sequence[float], supply: Supply | None) -> None:
        module = replica.module
        traced = {mode: follow(module, looked_into(module), training=mode) for mode in (True, False)}
        self._traced = traced
        super().__init__(replica, group, traced)
        self.weight = weights[group.index]
        if not self.program.has_output:
            assert supply is not None, "only training has groups with heads"
            self.head = TrainedHead(self._make_head(supply.sample()), replica, reads=self.program.end)

    def _place(self, traced: Steps) -> Mapping[str, int]:
        groups = groups_for(traced, self._group.size)
        return {node.module: rank for rank, group in enumerate(groups) for node in group if node.module}

    def _assign(self, traced: Steps) -> Mapping[str, int]:
        groups = groups_by_depth(traced.nodes, self._group.size)
        return {node.name: rank for rank, group in enumerate(groups) for node in group}

    def _make_head(self, sample: Any) -> AuxiliaryHead:
        """Of the shapes that a sample has on its way through the model."""
        replica = self._replica
        traced = self._traced[replica.module.training]
        inputs, _ = split_batch(sample)
        found = _results(replica.module, traced, inputs, (self.program.end, traced.output))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(replica.task.seed, self._group.index) >> 1)
            return AuxiliaryHead(*found).to(replica.device)

    def _output(self, result: Any) -> Any:
        return result if self.head is None else self.head.module(*result)


def groups_for(traced: Steps, workers: int) -> list[Sequence[GraphNode]]:
    """A group of layers for each worker."""
    groups = groups_by_depth(traced.nodes, workers)
    if len(groups) < workers:
        raise SpecError(
            f"layer: decoupled=on cuts the model into a group of layers for each of the {workers} workers, but it "
            f"has only {len(groups)} that follow one another; use fewer workers."
        )
    return groups


def _results(module: nn.Module, traced: Traced, inputs: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """What some steps make of a sample."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False, graph=traced.graph)
    with in_mode(module, training=False), torch.no_grad():  # BatchNorm must not move
        interpreter.run(*traced.given(inputs).values())
    found = {name: interpreter.env[traced.steps[name]] for name in names}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise SpecError(
                f"layer: decoupled=on needs features and an output that are single tensors, found "
                f"{type(value).__name__} from {name!r}; use pipeline or place=."
            )
    return list(found.values())


def looked_into(module: nn.Module) -> list[str]:
    """What is looked into besides the model itself: the parts of a `blocks` attribute that is called as one."""
    blocks = getattr(module, "blocks", None)
    return [f"blocks.{name}" for name, _ in blocks.named_children()] if isinstance(blocks, nn.Module) else []
