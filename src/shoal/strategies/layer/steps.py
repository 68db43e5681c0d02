"""The steps of a forward pass, each of which has a worker: submodules, and the functions between them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx, nn

from shoal.errors import SpecError
from shoal.strategies.cut.graph import StageCode, part_of
from shoal.strategies.cut.stage_run import StageCall
from shoal.strategies.cut.tracing import bind, state_used, trace
from shoal.strategies.layer.graph import GraphNode


class Steps(Protocol):
    """A forward pass as steps: what torch.fx has followed (`Traced`), or a model's blocks (`BlockSteps`)."""

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """As plain data, in order."""

    @property
    def output(self) -> str:
        """The step that makes the model's output."""

    def given(self, inputs: Any) -> dict[str, Any]:
        """The model's inputs by the names of its arguments, and the defaults of others."""

    def stage(self, module: nn.Module, steps: Sequence[str], reads: Sequence[str]) -> StageCall:
        """What runs a line of steps, with the module's layers, from results of other steps."""

    def state_of(self, module: nn.Module, step: str) -> list[torch.Tensor]:
        """The parameters and buffers that a step uses."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A forward pass: its steps as torch can run them, and as plain data."""

    steps: Mapping[str, fx.Node]
    nodes: tuple[GraphNode, ...]
    output: str
    graph: fx.Graph
    signature: inspect.Signature

    def given(self, inputs: Any) -> dict[str, Any]:
        return bind(self.signature, inputs, with_defaults=True)

    def stage(self, module: nn.Module, steps: Sequence[str], reads: Sequence[str]) -> StageCall:
        graph = part_of(
            module,
            self.graph,
            [self.steps[name] for name in steps],
            entering=[self.steps[name] for name in reads],
            leaving=None if steps[-1] == self.output else [self.steps[steps[-1]]],
        )
        return partial(StageCode(module, graph), module)

    def state_of(self, module: nn.Module, step: str) -> list[torch.Tensor]:
        return state_used(module, self.steps[step])


def follow(module: nn.Module, placed: Collection[str] = (), *, training: bool = True) -> Traced:
    """What a module computes while it trains, or otherwise; only where something inside was placed, in detail."""

    def stays_whole(_: nn.Module, name: str) -> bool:
        return not any(one.startswith(f"{name}.") for one in placed)

    try:
        graph = trace(module, stays_whole, training=training)
    except Exception as error:  # the model's own code runs here, on stand-ins for tensors
        raise SpecError(
            f"layer: the forward of {type(module).__name__} cannot be followed ({' '.join(str(error).split())}); "
            "it must call its children without asking for values, such as `if x.sum() > 0`; use sharded or data."
        ) from None
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    steps = {node.name: node for node in graph.nodes if node not in inputs}
    nodes = tuple(_described(module, node, inputs) for node in steps.values())
    signature = inspect.signature(module.forward)
    return Traced(steps=steps, nodes=nodes, output=nodes[-1].name, graph=graph, signature=signature)


def _described(module: nn.Module, node: fx.Node, inputs: Collection[fx.Node]) -> GraphNode:
    """A step as plain data; the model's inputs are left out of what it reads."""
    params = [tensor for tensor in state_used(module, node) if isinstance(tensor, nn.Parameter)]
    return GraphNode(
        name=node.name,
        inputs=tuple(source.name for source in node.all_input_nodes if source not in inputs),
        module=str(node.target) if node.op == "call_module" else "",
        size=sum(param.numel() for param in params),
        has_weights=any(param.dim() > 1 for param in params),
    )
