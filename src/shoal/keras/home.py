"""Where Keras's variables are while nobody trains.

Who trains may have its values in memory that all processes share: what a callback, or a script between two `fit`s,
changes there would be changed once by each process, and under the eyes of those who still read. So between steps
every process has the values of all in variables of its own; before the next step the first one's count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import TaskError
from shoal.keras.graph import as_module
from shoal.keras.operation import KerasOperation
from shoal.keras.optimizers import as_torch
from shoal.keras.task import variables_of
from shoal.roles.trainer.trainer import Trainer


class Kept(NamedTuple):
    """A variable of Keras's, and the tensor that is its value while nobody trains."""

    variable: Any
    value: torch.Tensor


class KerasHome:
    """A model's own variables, and the modules that train in their place."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept = _kept_values(as_module(model))
        self._modules: list[nn.Module] = []

    def make(self) -> nn.Module:
        """The model in torch's clothes, with values of its own: a server's are not the worker's beside it."""
        module = as_module(self._model)
        with torch.no_grad():
            for part in module.modules():
                for name, param in part._parameters.items():
                    if param is not None:
                        part._parameters[name] = nn.Parameter(param.clone(), requires_grad=param.requires_grad)
                for name, buffer in part._buffers.items():
                    part._buffers[name] = None if buffer is None else buffer.clone()
        self._modules.append(module)
        return module

    def optimizer(self, params: Any) -> Any:
        """The compiled one, for what a module of these has."""
        params = list(params)
        known: dict[int, Any] = {}
        for module in self._modules:
            known |= variables_of(module)
        return as_torch(self._model.optimizer, params, [known[id(param)] for param in params])

    def forget(self) -> None:
        """The modules so far are of no use any more."""
        self._modules.clear()

    def send(self, trainer: Trainer, state: Mapping[str, Any] | None) -> None:
        """Let all train from the first process's values, with what the optimizer kept."""
        with tempfile.TemporaryDirectory(prefix="shoal-keras-") as own:
            path = Path(trainer.hear_first(own)) / "begin.safetensors"
            if trainer.world.is_first:
                save_tensors(path, {name: kept.value.detach() for name, kept in self._kept.items()})
            trainer.hear_first()
            if state is None:
                trainer.load(path)
            else:
                trainer.load_state_dict({**state, "model": load_tensors(path)})
            trainer.hear_first()  # until then the first keeps the file

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let Keras's variables be their own tensors again, which a pass has replaced, with these values."""
        with torch.no_grad():
            for name, kept in self._kept.items():
                kept.variable._value = kept.value
                kept.value.copy_(values[name])

    def is_changed(self, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether the variables have others than these."""
        return not all(torch.equal(kept.value, values[name]) for name, kept in self._kept.items())


class Once:
    """Prints what a strategy says whenever it is opened, the first time."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            print(line)


class Compiled:
    """What `compile` has set, to see whether it was called again."""

    def __init__(self, model: Any) -> None:
        self.optimizer, self.loss = model.optimizer, model._compile_loss
        self._trained = [id(variable) for variable in model.trainable_variables]

    def is_still_that_of(self, model: Any) -> bool:
        """Refuses a model of which other layers are trained by now."""
        is_same = model.optimizer is self.optimizer and model._compile_loss is self.loss
        if is_same and self._trained != [id(variable) for variable in model.trainable_variables]:
            raise TaskError(
                "shoal.keras.distribute: other layers are trainable than in the last fit; call compile() again."
            )
        return is_same


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """By the names that `KerasHome` knows, those of a module of its own."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _kept_values(module: nn.Module) -> dict[str, Kept]:
    bound = {
        (id(each.owner), each.name): each.variable
        for part in module.modules()
        if isinstance(part, KerasOperation)
        for each in part.bound
    }
    found = {}
    for prefix, part in module.named_modules():
        for name in (*part._parameters, *part._buffers):
            if (variable := bound.get((id(part), name))) is not None:
                found[f"{prefix}.{name}" if prefix else name] = Kept(variable, variable._value)
    return found
