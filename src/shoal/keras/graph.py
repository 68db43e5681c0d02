"""A Keras model as a graph of its layers, which Shoal can cut; or as one piece, where nobody can look into it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from shoal.keras.installed import load_keras
from shoal.keras.operation import CallForm, KerasInput, KerasOperation, as_operation, plain_name

Remake = Callable[[], nn.Module]
"""Makes the same model again, in float64."""


class Rewritable(nn.Module):
    """A Keras model in torch's clothes. Its numbers are Keras's own, so they are changed by making it again."""

    keras_model: Any
    """Keras's own model."""

    def double(self) -> Any:
        """The same model with the same values, in float64."""
        remake: Remake = self.__dict__["remake"]
        other = remake()
        other.load_state_dict(self.state_dict())
        for name, own in self.named_modules():
            theirs = other.get_submodule(name)
            if isinstance(own, KerasOperation):
                assert isinstance(theirs, KerasOperation)
                own.take(theirs)
            elif isinstance(own, KerasInput):
                own.__dict__["spec"] = theirs.__dict__["spec"]
        self.__dict__["keras_model"] = other.__dict__["keras_model"]
        return self


class KerasGraph(Rewritable, fx.GraphModule):
    """A model whose layers are called one after the other, each by its name."""


class KerasWhole(Rewritable, KerasOperation):
    """A model that says in its own code how its layers are called, or whose losses lie in its layers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, is_whole=True)


def as_module(model: Any) -> nn.Module:
    """A built Keras model as torch knows models."""
    module: nn.Module
    module = KerasWhole(model) if why_whole(model) else _as_graph(_functional(model))
    module.__dict__["keras_model"] = model
    return module


def let_go(module: nn.Module) -> None:
    """Keras keeps no value that the graph has: its layers know each other, and whoever gets one of them in a cut
    model would keep the values of all."""
    for operation in module.modules():
        if isinstance(operation, KerasOperation) and not operation.is_whole:
            for bound in operation.bound:
                bound.variable._value = None
    for layer in module.__dict__["keras_model"]._flatten_layers():
        layer._modules.pop("_torch_params", None)


def why_whole(model: Any) -> str:
    """Why a model cannot be a graph of its layers; empty where it can."""
    keras = load_keras()
    functional = _functional(model)
    if functional is None:
        return "its own code calls its layers"
    base = keras.Model
    for name in ("compute_loss", "train_step", "test_step"):
        if getattr(type(model), name) is not getattr(base, name):
            return f"it has a {name} of its own"
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False):
            return f"{layer.name} hands on a mask beside its output"
        if _has_losses(layer):
            return f"{layer.name} has a loss of its own, such as a regularizer's"
    names = [plain_name(spec.name) for spec in functional.inputs]
    return "" if len(set(names)) == len(names) else "two of its inputs have one name"


def _functional(model: Any) -> Any:
    """The graph of a model that has one."""
    keras = load_keras()
    from keras.src.models.functional import Functional

    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return model._functional
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    return None


def _has_losses(layer: Any) -> bool:
    known = (*layer._trainable_variables, *layer._non_trainable_variables)
    return (
        getattr(layer, "activity_regularizer", None) is not None
        or any(variable.regularizer is not None for variable in known)
        or bool(layer._losses)
        or "add_loss" in type(layer).call.__code__.co_names
    )


def _as_graph(functional: Any) -> KerasGraph:
    keras, root, graph = load_keras(), nn.Module(), fx.Graph()
    made: dict[int, fx.Node] = {}
    operations: dict[int, tuple[str, KerasOperation]] = {}
    taken = {*dir(KerasGraph), *(plain_name(spec.name) for spec in functional.inputs)}
    placeholders = [graph.placeholder(plain_name(name)) for name in input_names(functional)]
    for spec, node in zip(functional.inputs, placeholders, strict=True):
        name = f"{node.name}_input"
        taken.add(name)
        root.add_module(name, KerasInput(spec))
        made[id(spec)] = graph.call_module(name, (node,))
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        for call in functional._nodes_by_depth[depth]:
            if call.is_input or any(id(tensor) not in made for tensor in call.input_tensors):
                continue
            if id(call.operation) not in operations:
                name = _free(plain_name(call.operation.name), taken)
                operations[id(call.operation)] = (name, as_operation(call.operation))
                root.add_module(name, operations[id(call.operation)][1])
            name, operation = operations[id(call.operation)]
            tensors = _once(call.input_tensors)
            operation.forms.append(CallForm(call.arguments.args, call.arguments.kwargs, tensors))
            number = len(operation.forms) - 1
            found = graph.call_module(
                name, tuple(made[id(tensor)] for tensor in tensors), {"form": number} if number else {}
            )
            if len(call.outputs) == 1:
                made[id(call.outputs[0])] = found
            else:
                for index, output in enumerate(call.outputs):
                    made[id(output)] = graph.call_function(operator.getitem, (found, index))
    outputs = keras.tree.pack_sequence_as(
        functional._outputs_struct, [made[id(each)] for each in functional.outputs]
    )
    graph.output(outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs)
    return KerasGraph(root, graph)


def input_names(functional: Any) -> list[str]:
    """What a functional model calls its inputs: by the keys of the dict that it takes, or by their own names."""
    if isinstance(functional._inputs_struct, dict):
        paths = load_keras().tree.flatten_with_path(functional._inputs_struct)
        return ["_".join(map(str, path)) for path, _ in paths]
    return [spec.name for spec in functional.inputs]


def _once(tensors: Any) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _free(name: str, taken: set[str]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found
