"""A model's forward pass as a graph of calls, which can be cut.

Layers of torch stay whole, and so do modules that have no others inside. Containers and the task's own modules are
looked into, unless torch.fx cannot follow what they do: then they stay whole, too. The outermost module must be
one that it can follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx._symbolic_trace import _assert_is_none

from shoal.errors import TaskError

_MAKERS = ("arange", "zeros", "ones", "full", "empty", "rand", "randn")
"""Make tensors from sizes, which are not known while tracing; torch.fx does not record these by itself."""


def bind(forward: inspect.Signature, inputs: Any) -> dict[str, Any]:
    """What a model is given, by the names of its arguments."""
    if isinstance(inputs, dict):
        return dict(forward.bind(**inputs).arguments)
    if isinstance(inputs, (tuple, list)):
        return dict(forward.bind(*inputs).arguments)
    return dict(forward.bind(inputs).arguments)


def trace(module: nn.Module, given: Mapping[str, Any], whole: Set[nn.Module], *, training: bool) -> fx.Graph:
    """What the model does in training or in evaluation; arguments that are not `given` have their defaults.

    Modules in `whole` are not looked into.
    """
    parameters = inspect.signature(module.forward).parameters
    absent = {name: each.default for name, each in parameters.items() if name not in given}
    modes = {each: each.training for each in module.modules()}
    module.train(training)
    try:
        with _recorded_makers():
            graph = _Tracer(_opaque(module, whole)).trace(module, concrete_args=absent or None)
    except Exception as error:
        raise TaskError(
            f"Task: pipeline cuts a model by following its forward pass, but that of {type(module).__name__} "
            f"cannot be followed ({_first_line(error)}); make it an nn.Sequential of its blocks, or use data, "
            "sharded or ps."
        ) from error
    finally:
        for each, mode in modes.items():
            each.training = mode
    _remove_checks(graph)
    return graph


class _Tracer(fx.Tracer):
    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        has_inner = any(True for _ in m.children())
        return not has_inner or m in self._opaque or super().is_leaf_module(m, module_qualified_name)


def _opaque(module: nn.Module, whole: Set[nn.Module]) -> set[nn.Module]:
    """Modules of the task's own inside of this one that cannot be followed; inner ones are tried first."""
    found = set(whole)
    for inner in reversed(list(module.modules())):
        if inner is module:
            continue
        if "forward" in vars(inner):  # somebody has wrapped it, to compute it twice perhaps: leave it so
            found.add(inner)
        if inner in found or type(inner).__module__.startswith("torch.nn."):
            continue
        try:
            _Tracer(found).trace(inner)
        except Exception:  # whatever its code does when it is not given tensors
            found.add(inner)
    return found


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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
