"""From a module to its computation: torch.fx follows the forward pass down to placed submodules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import SpecError
from shoal.strategies.layer.graph import GraphNode


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A forward pass: its steps as torch can run them, and as plain data."""

    steps: Mapping[str, fx.Node]
    nodes: tuple[GraphNode, ...]
    placeholders: tuple[fx.Node, ...]
    """The model's own inputs."""
    output: str
    """The step that makes the model's output."""
    graph: fx.Graph

    def bind(self, inputs: Any) -> dict[fx.Node, Any]:
        """Give the model's inputs (a tensor, a tuple of arguments, a dict of named ones) to its placeholders."""
        named = inputs if isinstance(inputs, dict) else {}
        places = iter(inputs if isinstance(inputs, (tuple, list)) else () if named else (inputs,))
        bound: dict[fx.Node, Any] = {}
        for node in self.placeholders:
            default = node.args[0] if node.args else None
            bound[node] = named[node.target] if node.target in named else next(places, default)
        return bound


class _LayerTracer(fx.Tracer):
    """Opens a submodule only where something inside it was placed."""

    def __init__(self, placed: Collection[str]) -> None:
        super().__init__()
        self._placed = placed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self._placed)


def trace(module: nn.Module, placed: Collection[str] = (), *, training: bool = True) -> Traced:
    """What the module computes while it trains, or otherwise."""
    try:
        with in_mode(module, training=training):
            graph = _LayerTracer(placed).trace(module)
    except Exception as error:  # the model's own code runs here, on stand-ins for tensors
        raise SpecError(
            f"layer: the forward of {type(module).__name__} cannot be followed ({' '.join(str(error).split())}); "
            "it must call its children without asking for values, such as `if x.sum() > 0`; use sharded or data."
        ) from None
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    steps = {node.name: node for node in graph.nodes if node not in inputs}
    nodes = tuple(_described(module, node, inputs) for node in steps.values())
    placeholders = tuple(node for node in graph.nodes if node in inputs)
    return Traced(steps=steps, nodes=nodes, placeholders=placeholders, output=nodes[-1].name, graph=graph)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Let a module and all in it train, or not, for a while."""
    modes = {layer: layer.training for layer in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def state_used(module: nn.Module, node: fx.Node) -> list[torch.Tensor]:
    """Parameters and buffers that a step uses."""
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        return [*part.parameters(), *part.buffers()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [getattr(module.get_submodule(owner), name)]
    return []


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
