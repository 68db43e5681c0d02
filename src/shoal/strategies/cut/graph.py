"""Parts of a model's graph: the calls of one stage, with what enters it and what leaves it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

_CARRIED = "carried_"
"""Begins the names of what other stages carry over; all other arguments the model is given."""
_IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "setitem")
}
"""What `a += b` and the like call; functions and methods of torch's that do so end in an underscore."""


def part_of(
    whole: nn.Module,
    graph: fx.Graph,
    inside: Sequence[fx.Node],
    *,
    entering: Sequence[fx.Node],
    leaving: Sequence[fx.Node] | None,
) -> fx.Graph:
    """The calls `inside` a stage, from values that enter it to those that leave it, as a tuple; `leaving` is None
    where it ends as the whole does."""
    part = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: part.placeholder(f"{_CARRIED}{node.name}") for node in entering}
    used = {source for node in inside for source in node.all_input_nodes}.union(leaving or ())
    for node in graph.nodes:
        if node.op == "placeholder" and node in used:
            made[node] = part.placeholder(node.target)
    for node in entering:
        if any(_changes(whole, call, node) for call in inside):
            made[node] = part.call_function(copied, (made[node],))  # what autograd began with must stay
    for node in graph.nodes:
        if node.op == "get_attr" and node in used and node not in made:
            made[node] = part.node_copy(node)
    for node in inside:
        if node.op not in ("placeholder", "get_attr", "output"):
            made[node] = part.node_copy(node, made.__getitem__)
    if leaving is not None:
        part.output(tuple(made[node] for node in leaving))
    else:
        end = next(node for node in graph.nodes if node.op == "output")
        part.output(fx.node.map_arg(end.args[0], made.__getitem__))
    return part


def copied(value: Any) -> Any:
    """The same value in memory of its own."""
    return tree_map_only(torch.Tensor, torch.clone, value)


def _changes(whole: nn.Module, call: fx.Node, value: fx.Node) -> bool:
    """Whether a call changes a value in place."""
    changed = call.args[0] if call.args else next(iter(call.all_input_nodes), None)
    if changed is not value:
        return False
    if call.op == "call_module":
        return bool(getattr(whole.get_submodule(str(call.target)), "inplace", False))
    name = str(call.target if call.op == "call_method" else getattr(call.target, "__name__", ""))
    is_named_so = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return is_named_so or call.target in _IN_PLACE or bool(call.kwargs.get("inplace"))


class StageCode:
    """What a part of a graph computes, without the layers: these are looked up, whenever it is called, in the
    module that it is called with, where they may have been replaced meanwhile."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        """`module` has the layers under the names that the graph knows them by."""
        arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self._given = [name for name in arguments if not name.startswith(_CARRIED)]
        self._forward: Callable[..., Any] = type(fx.GraphModule(module, graph)).forward

    def __call__(self, module: nn.Module, carried: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """From what other stages carry over, and what the model is given."""
        return self._forward(module, *carried, *(given[name] for name in self._given))
