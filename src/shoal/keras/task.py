"""Tasks of compiled Keras models: loss, optimizer and metrics are those that `compile` was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from shoal.datasets.arrays import Arrays
from shoal.errors import TaskError
from shoal.keras.graph import KerasGraph, as_module, let_go
from shoal.keras.installed import as_if_first, in_numbers, load_keras
from shoal.keras.loss import TARGET, WEIGHTS, KerasLoss, metrics_of, split_target
from shoal.keras.optimizers import KerasSchedule, as_torch, schedule_of
from shoal.spec import Task
from shoal.spec.checks import require_callable
from shoal.spec.task import is_maker

_OWNER = "Task.from_keras"


def make_task(
    build: Callable[[], Any],
    train: Any,
    *,
    class_weight: Mapping[int, float] | None = None,
    test: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    **fields: Any,
) -> Task:
    """See `Task.from_keras`."""
    keras = load_keras()
    require_callable(_OWNER, "build", build, "a function that returns a compiled model")
    if isinstance(build, keras.Model):
        raise TaskError(
            f"{_OWNER}: every process makes the model for itself, but found one that is made "
            f"({type(build).__name__}); give a function that builds and compiles it."
        )
    parts = KerasParts(build, KerasLoss(class_weight))
    sets = {"train": as_set("train", train), "test": None if test is None else as_set("test", test)}
    parts.source = sets["train"]
    parts.collate = collate or collated
    tried = parts.build()
    given = {"optimizer": parts.optimizer, "metrics": metrics_of(tried), **fields}
    if "optimizer" not in fields and "scheduler" not in fields and schedule_of(tried.optimizer) is not None:
        given["scheduler"] = parts.scheduler
    return Task(model=parts.make, loss=parts.loss, collate=parts.collate, **sets, **given)


class KerasParts:
    """What a compiled model says of its own training, in the words of a task."""

    source: Any = None
    """The training set: a model that knows no shapes yet is shown two of its samples."""
    collate: Callable[[list[Any]], Any]

    def __init__(self, build: Callable[[], Any], loss: KerasLoss) -> None:
        self._build = build
        self.loss = loss
        self._made: list[weakref.ref[nn.Module]] = []
        self._optimizer: Any = None
        self._sample: Any = None

    def make(self) -> nn.Module:
        """The model as a module of torch's, with the values that follow from torch's seed."""
        module = as_module(self.build())
        if isinstance(module, KerasGraph):
            let_go(module)
        module.__dict__["remake"] = lambda: as_module(self.build("float64"))
        self._made = [ref for ref in self._made if ref() is not None] + [weakref.ref(module)]
        if torch.get_default_device().type == "meta":
            module.to("meta")
        return module

    def build(self, numbers: str | None = None) -> Any:
        """Keras's own model, built and checked; its loss and metrics know their shapes."""
        keras = load_keras()
        with (
            torch.device("cpu"),
            keras.device("cpu"),
            in_numbers(numbers),
            as_if_first(torch.initial_seed() % 2**31),
        ):
            model = self._build()
            if not isinstance(model, keras.Model):
                raise TaskError(
                    f"{_OWNER}: build() must return a Keras model, found {type(model).__name__}; return one."
                )
            if not model.compiled:
                raise TaskError(f"{_OWNER}: the model is not compiled; let build() call compile(optimizer, loss).")
            if type(model).train_step is not keras.Model.train_step:
                raise TaskError(
                    f"{_OWNER}: {type(model).__name__} has a train_step of its own, which makes the update, too; "
                    "put its loss into compute_loss."
                )
            inputs, target = self._sampled()
            y, weights = split_target(target)
            model._symbolic_build(data_batch=(_as_keras(inputs, model), y, weights))
        self.loss.learn(model, dtype_of(model))
        self._optimizer = model.optimizer
        return model

    def _sampled(self) -> Any:
        if self._sample is None:
            source = self.source() if is_maker(self.source) else self.source
            rows = [source[0], source[min(1, len(source) - 1)]]
            self._sample = self.collate(rows)
        return self._sample

    def optimizer(self, params: Any) -> Any:
        """The one that the model was compiled with which has these parameters."""
        params = list(params)
        for ref in reversed(self._made):
            module = ref()
            if module is None:
                continue
            variables = variables_of(module)
            if params and id(params[0]) in variables:
                found = [variables[id(param)] for param in params]
                return as_torch(module.__dict__["keras_model"].optimizer, params, found)
        keras = load_keras()  # layers that are trained besides: as one of the model's would be
        return as_torch(self._optimizer, params, [keras.Variable(param.detach().clone()) for param in params])

    def scheduler(self, optimizer: Any) -> Any:
        """The schedule of the learning rate."""
        rate = schedule_of(self._optimizer)
        assert rate is not None
        return KerasSchedule(optimizer, rate)


def collated(rows: list[Any]) -> Any:
    """A batch of samples `(x, y)`, or `(x, y, weight)`."""
    batch = default_collate(rows)
    return as_pair(batch)


def as_pair(batch: Any) -> Any:
    """Inputs and target, as a task has them."""
    if isinstance(batch, (tuple, list)) and len(batch) == 3:
        return _plain(batch[0]), {TARGET: _plain(batch[1]), WEIGHTS: batch[2]}
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return _plain(batch[0]), _plain(batch[1])
    raise TaskError(
        f"{_OWNER}: a sample must be (x, y) or (x, y, weight), found {type(batch).__name__}; let the data be such."
    )


def _plain(value: Any) -> Any:
    """Lists as tuples, which a task calls a model with."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value


def as_set(part: str, given: Any) -> Any:
    """Arrays `(x, y)` or `(x, y, weights)`, each perhaps several, as a set; all else as it is."""
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not is_arrays(given):
        return given
    return Arrays(_numbers(as_pair(given)), part)


def is_arrays(value: Any) -> bool:
    """Whether it is arrays of rows, perhaps several, in tuples, lists or dicts."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(is_arrays, value))
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_arrays, value.values()))
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0


def _numbers(value: Any) -> Any:
    """Floating-point numbers as Keras would read them: of its own width."""
    if isinstance(value, tuple):
        return tuple(_numbers(each) for each in value)
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and load_keras().config.floatx() == "float64":
        return torch.from_numpy(value)
    return value


def _as_keras(inputs: Any, model: Any) -> Any:
    """A batch's inputs as the model's own structure has them."""
    return list(inputs) if isinstance(inputs, tuple) else inputs


def variables_of(module: nn.Module) -> dict[int, Any]:
    """The variables of Keras by the parameters that are their values."""
    found = {}
    for part in module.modules():
        for bound in part.__dict__.get("bound", ()):
            param = bound.owner._parameters.get(bound.name)
            if param is not None:
                found[id(param)] = bound.variable
    return found


def dtype_of(model: Any) -> torch.dtype:
    from keras.src.backend.torch.core import to_torch_dtype

    found: torch.dtype = to_torch_dtype(model.compute_dtype)
    return found
