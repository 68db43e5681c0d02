"""Groups of layers that train at the same time: each by its own head, on its predecessor's detached features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.comm.group import Group
from shoal.errors import SpecError
from shoal.ledger.order import mix
from shoal.strategies.base import Supply
from shoal.strategies.cut.tracing import in_mode
from shoal.strategies.gradients import split_batch
from shoal.strategies.layer.graph import groups_by_depth
from shoal.strategies.layer.heads import AuxiliaryHead
from shoal.strategies.layer.lines import LayerLine
from shoal.strategies.layer.steps import Traced
from shoal.strategies.layer.trained_head import TrainedHead
from shoal.strategies.replica import Replica


class DecoupledLine(LayerLine):
    """Features go forward, and nothing comes back; the last group's loss is the task's own."""

    returns = False

    def __init__(self, replica: Replica, group: Group, weights: Sequence[float], supply: Supply | None) -> None:
        super().__init__(replica, group, placed=looked_into(replica.module))
        self.weight = weights[group.index]
        if not self.program.has_output:
            assert supply is not None, "only training has groups with heads"
            self.head = TrainedHead(self._make_head(supply.sample()), replica, reads=self.program.end)

    def _place(self, traced: Traced) -> Mapping[str, int]:
        groups = groups_by_depth(traced.nodes, self._group.size)
        if len(groups) < self._group.size:
            raise SpecError(
                f"layer: decoupled=on cuts the model into a group of layers for each of the {self._group.size} "
                f"workers, but it has only {len(groups)} that follow one another; use fewer workers."
            )
        return {node.module: rank for rank, group in enumerate(groups) for node in group if node.module}

    def _assign(self, traced: Traced) -> Mapping[str, int]:
        groups = groups_by_depth(traced.nodes, self._group.size)
        return {node.name: rank for rank, group in enumerate(groups) for node in group}

    def _make_head(self, sample: Any) -> AuxiliaryHead:
        """Of the shapes that a sample has on its way through the model."""
        replica, traced = self._replica, self.program.traced
        inputs, _ = split_batch(sample)
        shapes = _Shapes(replica.module, traced, (self.program.end, traced.output))
        found = shapes.of(inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(replica.task.seed, self._group.index) >> 1)
            return AuxiliaryHead(*found).to(replica.device)

    def _output(self, result: Any) -> Any:
        return result if self.head is None else self.head.module(*result)


class _Shapes(fx.Interpreter):
    """Runs one sample through the whole model, for the looks of some results."""

    def __init__(self, module: nn.Module, traced: Traced, wanted: Sequence[str]) -> None:
        super().__init__(module, garbage_collect_values=False, graph=traced.graph)
        self._traced = traced
        self._wanted = wanted

    @torch.no_grad()
    def of(self, inputs: Any) -> list[torch.Tensor]:
        """The wanted results."""
        given = self._traced.given(inputs)
        self.env = {node: given[node.target] for node in self._traced.graph.nodes if node.op == "placeholder"}
        with in_mode(self.module, training=False):  # BatchNorm must not move
            for step in self._traced.steps.values():
                self.env[step] = self.run_node(step)
        return [self._single(name) for name in self._wanted]

    def _single(self, name: str) -> torch.Tensor:
        value = self.env[self._traced.steps[name]]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise SpecError(
                f"layer: decoupled=on needs features and an output that are single tensors, found "
                f"{type(value).__name__} from {name!r}; use pipeline or place=."
            )
        return value


def looked_into(module: nn.Module) -> list[str]:
    """What is looked into besides the model itself: the parts of a `blocks` attribute that is called as one."""
    blocks = getattr(module, "blocks", None)
    return [f"blocks.{name}" for name, _ in blocks.named_children()] if isinstance(blocks, nn.Module) else []
