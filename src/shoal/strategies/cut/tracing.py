"""A model's forward pass as a graph of calls, which can be cut: torch.fx follows it."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx._symbolic_trace import _assert_is_none

from shoal.model.replica import Arguments

_MAKERS = ("arange", "zeros", "ones", "full", "empty", "rand", "randn")
"""Make tensors from sizes, which are not known while tracing; torch.fx does not record these by itself."""

StaysWhole = Callable[[nn.Module, str], bool]
"""Whether a submodule, which has this name, is one call; else it is looked into."""


def trace(
    module: nn.Module,
    stays_whole: StaysWhole,
    *,
    training: bool,
    absent: Mapping[str, Any] | None = None,
    records_buffers: bool = False,
) -> fx.Graph:
    """What a module does in training, or otherwise; raises whatever its code does when it is not given tensors.

    `absent`: arguments that nobody will ever give, with their defaults; without it the graph takes all of them.
    `records_buffers`: whether what is done with a buffer becomes part of the graph, as it does with a parameter;
    else it is done at once, while tracing, as far as no tensor of the batch has to do with it.
    """
    tracer = _CutTracer(stays_whole)
    tracer.proxy_buffer_attributes = records_buffers
    with in_mode(module, training=training), _recorded_makers():
        graph = tracer.trace(module, concrete_args=dict(absent) if absent else None)
    if absent is not None:
        _remove_checks(graph)
    return graph


class _CutTracer(fx.Tracer):
    def __init__(self, stays_whole: StaysWhole) -> None:
        super().__init__()
        self._stays_whole = stays_whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._stays_whole(m, module_qualified_name)


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


def bind(forward: inspect.Signature, inputs: Any, *, with_defaults: bool = False) -> dict[str, Any]:
    """What a model is given (a tensor, a tuple of arguments, a dict of named ones), by its arguments' names."""
    if isinstance(inputs, Arguments):
        bound = forward.bind(*inputs.positional, **inputs.named)
    elif isinstance(inputs, dict):
        bound = forward.bind(**inputs)
    elif isinstance(inputs, (tuple, list)):
        bound = forward.bind(*inputs)
    else:
        bound = forward.bind(inputs)
    if with_defaults:
        bound.apply_defaults()
    return dict(bound.arguments)


def call_given(module: nn.Module, forward: inspect.Signature, given: Mapping[str, Any]) -> Any:
    """Call a model with what `bind` has found by name."""
    call = inspect.BoundArguments(forward, OrderedDict(given))
    return module(*call.args, **call.kwargs)


def state_used(module: nn.Module, node: fx.Node) -> list[torch.Tensor]:
    """Parameters and buffers that a call uses."""
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        return [*part.parameters(), *part.buffers()]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return [getattr(module.get_submodule(owner), name)]
    return []


@contextmanager
def _recorded_makers() -> Iterator[None]:
    """While tracing, functions that make tensors from recorded sizes are recorded themselves."""
    originals = {name: getattr(torch, name) for name in _MAKERS}
    for name, make in originals.items():
        setattr(torch, name, _recording(make))
    try:
        yield
    finally:
        for name, make in originals.items():
            setattr(torch, name, make)


def _recording(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda one: found.append(one) if isinstance(one, fx.Proxy) else None)
        if not found:
            return make(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", make, args, kwargs)

    return call


def _remove_checks(graph: fx.Graph) -> None:
    """torch.fx checks at every call that absent arguments stay absent; nobody gives them here."""
    for node in reversed(graph.nodes):
        is_check = node.op == "call_function" and node.target in (_assert_is_none, torch._assert)
        if is_check and not node.users:
            compared = node.args[0]
            graph.erase_node(node)
            if isinstance(compared, fx.Node) and compared.op == "call_function" and not compared.users:
                graph.erase_node(compared)
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
