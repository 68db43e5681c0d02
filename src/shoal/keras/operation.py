"""Layers of Keras as modules whose state torch can name: what is trained, what is frozen, and what moves.

Keras keeps all variables of a layer as parameters, the moving statistics of BatchNorm and the states of its random
generators among them. Parameters that need no gradient are frozen for everybody who knows torch, and may lie in
memory that processes share; so what moves is made a buffer here, and random states are drawn anew for every pass.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import TaskError
from shoal.keras.installed import computing, load_keras, seed_global, set_seed
from shoal.keras.synchronised import shared_moments
from shoal.model.gathering import Asking
from shoal.model.normalising import BatchNormalising


@dataclass(frozen=True)
class Bound:
    """A variable of Keras, and where its value is."""

    variable: Any
    owner: nn.Module
    name: str

    def refresh(self) -> None:
        """Whoever trains may have put another tensor there."""
        found: torch.Tensor | None = self.owner._parameters.get(self.name)
        if found is None:
            found = self.owner._buffers[self.name]
        self.variable._value = found


@dataclass(frozen=True)
class CallForm:
    """How a layer is called at one point of a graph: everything but its tensors."""

    args: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    marks: Sequence[Any] = ()
    """Stand for the tensors, in their order."""

    def fill(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments with these tensors."""
        tree = load_keras().tree
        given = {id(mark): tensor for mark, tensor in zip(self.marks, tensors, strict=True)}
        return tree.map_structure(lambda leaf: given.get(id(leaf), leaf), (self.args, self.kwargs))


class _Last(threading.local):
    """What the last pass of this thread was; slots that meet have a thread each."""

    operation: KerasOperation | None = None
    inputs: Any = None


last_pass = _Last()


class Quiet:
    """Whether randomness is off though BatchNorm trains: then the layers inside are told that nobody does."""

    is_on = False

    def tell(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before each call of a layer."""
        if self.is_on and "training" in kwargs:
            return args, {**kwargs, "training": False}
        return None


_QUIET = "_shoal_quiet"


class Holder(nn.Module):
    """The variables of a layer that lies inside another."""


class BatchNormHolder(BatchNormalising, Holder):
    """The same of a BatchNorm layer."""

    layer: Any
    """Keras's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def synchronise(self, asking: Asking) -> None:
        """Its moments become those of all slots' batches."""
        self.__dict__["asking"] = asking  # where `recompute` finds it
        self.layer.__dict__["_moments"] = partial(shared_moments, self.layer, asking)


class KerasOperation(nn.Module):
    """One layer of Keras, or a whole model that nobody can look into.

    Keras's object is no submodule of this: names and modes are torch's here, and Keras is told the mode.
    """

    operation: Any
    """Keras's layer, model or function."""
    bound: list[Bound]
    generators: list[Any]
    """Of random numbers, of all layers inside."""
    quiet: Quiet

    def __init__(self, operation: Any, *, is_whole: bool = False) -> None:
        super().__init__()
        self.is_whole = is_whole
        """Whether it is the model: then inputs are as a batch has them, and outputs as Keras gives them."""
        self.forms: list[CallForm] = []
        self._adopt(operation)

    def _adopt(self, operation: Any) -> None:
        layers = _layers_of(operation)
        self.__dict__["operation"] = operation
        self.__dict__["bound"] = []
        self.__dict__["generators"] = [one for layer in layers for one in getattr(layer, "_seed_generators", ())]
        self.__dict__["quiet"] = _quiet_of(operation, layers)
        self.takes_training = "training" in getattr(operation, "_call_context_args", ())
        moving = {id(v) for layer in layers for v in layer._non_trainable_variables}
        by_variable = {
            id(v): layer
            for layer in layers
            for v in (*layer._trainable_variables, *layer._non_trainable_variables)
        }
        for variable in getattr(operation, "weights", ()):
            self._register(variable, by_variable.get(id(variable)), id(variable) in moving)

    def _register(self, variable: Any, layer: Any, moves: bool) -> None:
        owner: nn.Module = self
        *path, name = _names_inside(variable.path, self.operation.name)
        for depth, part in enumerate(path):
            if part not in owner._modules:
                part = _free_name(owner, part)
                is_last = depth == len(path) - 1
                owner.add_module(part, BatchNormHolder(layer) if is_last and _is_batchnorm(layer) else Holder())
            owner = owner.get_submodule(part)
        name = _free_name(owner, name)
        value = variable._value
        if moves:
            owner.register_buffer(name, value.detach())
        else:
            owner.register_parameter(name, value)
        bound = Bound(variable, owner, name)
        bound.refresh()
        self.bound.append(bound)

    def forward(self, *tensors: Any, form: int = 0, **named: Any) -> Any:
        """As the graph, or the task, calls it."""
        if any(isinstance(each, fx.Proxy) for each in (*tensors, *named.values())):
            raise TaskError(f"Keras's layer {self.operation.name} is called with tensors alone.")
        keras = load_keras()
        for bound in self.bound:
            bound.refresh()
        args: Sequence[Any]
        kwargs: dict[str, Any]
        if self.is_whole:
            given: Any = named or (tensors[0] if len(tensors) == 1 else list(tensors))
            args, kwargs = (given,), {}
            last_pass.operation, last_pass.inputs = self, given
        else:
            args, kwargs = self.forms[form].fill(tensors)
        with computing(_device_of((tensors, named)), self._dtype), self._mode() as training:
            if self.takes_training:  # whatever the graph was drawn with: so does Keras
                kwargs = {**kwargs, "training": training}
            found = self.operation(*args, **kwargs)
        if self.is_whole:
            return found
        flat = keras.tree.flatten(found)
        return flat[0] if len(flat) == 1 else tuple(flat)

    @property
    def _dtype(self) -> Any:
        from keras.src.backend.torch.core import to_torch_dtype

        kind = getattr(self.operation, "compute_dtype", None)
        return None if kind is None else to_torch_dtype(kind)

    @contextmanager
    def _mode(self) -> Iterator[bool]:
        normalising = any(each.training for each in self.modules() if isinstance(each, BatchNormalising))
        trains = self.training or normalising
        if self.training:
            # The numbers of a slot follow from torch's own, which are keyed by step and slot.
            for generator in self.generators:
                set_seed(generator, _drawn())
            if self.is_whole:
                seed_global(_drawn())
        before, self.quiet.is_on = self.quiet.is_on, trains and not self.training
        try:
            yield trains
        finally:
            self.quiet.is_on = before

    def take(self, other: KerasOperation) -> None:
        """Become another one of the same form, with all its variables."""
        for name in ("operation", "generators", "quiet", "_parameters", "_buffers", "_modules"):
            self.__dict__[name] = other.__dict__[name]
        self.forms = other.forms
        self.__dict__["bound"] = [
            Bound(each.variable, self if each.owner is other else each.owner, each.name) for each in other.bound
        ]


class BatchNormOperation(BatchNormalising, KerasOperation):
    """A BatchNorm layer of Keras in a graph."""

    def synchronise(self, asking: Asking) -> None:
        """Its moments become those of all slots' batches."""
        self.__dict__["asking"] = asking  # where `recompute` finds it
        self.operation.__dict__["_moments"] = partial(shared_moments, self.operation, asking)


class KerasInput(nn.Module):
    """What Keras makes of a model's input: its numbers, and a dimension more or less."""

    spec: Any
    """Keras's own tensor that stands for it."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.__dict__["spec"] = spec

    def forward(self, x: torch.Tensor) -> Any:
        """As a functional model does with each of its inputs."""
        keras, spec = load_keras(), self.spec
        with keras.device(str(x.device)):
            x = keras.ops.convert_to_tensor(x, dtype=spec.dtype)
        if x.dim() == len(spec.shape) + 1 and x.shape[-1] == 1:
            return x.squeeze(-1)
        if x.dim() == len(spec.shape) - 1 and spec.shape[-1] == 1:
            return x.unsqueeze(-1)
        return x


def as_operation(operation: Any) -> KerasOperation:
    """A layer or function of Keras's as one step of a graph."""
    return BatchNormOperation(operation) if _is_batchnorm(operation) else KerasOperation(operation)


def _quiet_of(operation: Any, layers: Sequence[Any]) -> Quiet:
    """What the layers inside are told by, once and for all: a model may be dressed anew for every epoch."""
    known: dict[str, Any] = operation.__dict__
    if _QUIET not in known:
        known[_QUIET] = quiet = Quiet()
        for layer in layers if len(layers) > 1 else ():
            if not layer._layers and not _is_batchnorm(layer):
                layer.register_forward_pre_hook(quiet.tell, with_kwargs=True)
    found: Quiet = known[_QUIET]
    return found


def _is_batchnorm(layer: Any) -> bool:
    return isinstance(layer, load_keras().layers.BatchNormalization)


def _layers_of(operation: Any) -> list[Any]:
    """The layer, and those inside it; none for a function."""
    return list(operation._flatten_layers()) if hasattr(operation, "_flatten_layers") else []


def _drawn() -> int:
    return int(torch.randint(2**31 - 1, (), device="cpu"))


def _device_of(value: Any) -> str:
    for leaf in load_keras().tree.flatten(value):
        if isinstance(leaf, torch.Tensor):
            return str(leaf.device)
    return "cpu"


def _names_inside(path: str, name: str) -> list[str]:
    """Where a variable is inside a layer of this name, by the path that Keras gives it."""
    parts = path.split("/")
    if name in parts[:-1]:
        parts = parts[parts.index(name) + 1 :]
    return [plain_name(part) for part in parts]


def plain_name(name: str) -> str:
    """As torch allows it."""
    return re.sub(r"\W", "_", name) or "_"


def _free_name(owner: nn.Module, name: str) -> str:
    found, number = name, 0
    while hasattr(owner, found):
        number += 1
        found = f"{name}_{number}"
    return found
