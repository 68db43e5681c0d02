"""Keras's own `fit` in several processes, each of which computes a part of every batch.

In `train_step` each process takes its rows, and a `Trainer` makes the step of all; outputs are gathered in the
same pass, so every process has the losses and metrics of the whole batch, and callbacks see the same numbers
everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.errors import TaskError
from shoal.keras.graph import as_module
from shoal.keras.installed import load_keras
from shoal.keras.loss import TARGET, WEIGHTS, KerasLoss
from shoal.keras.operation import KerasOperation
from shoal.keras.optimizers import as_torch
from shoal.keras.task import dtype_of, variables_of
from shoal.model.gathering import gather
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import Task

_MANY = 4096
"""Samples of a batch that could be cut for any number of processes."""


class BatchFit:
    """Keras's own loop, of which a step is that of all processes."""

    def __init__(self, model: Any, strategy: str) -> None:
        self._model = model
        self._strategy = strategy
        self._own_fit = model.fit
        model.__dict__["train_step"] = self.train_step
        self._loss = KerasLoss(None)
        self._module: nn.Module | None = None
        self._trainer: Trainer | None = None
        self._output: Any = None

    def fit(self, *args: Any, callbacks: Any, verbose: Any, is_first: bool, **settings: Any) -> Any:
        """As Keras's own."""
        keras = load_keras()
        settled = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: self._settle())
        # Who shuffles draws from torch, and all must draw the same.
        torch.manual_seed(int(self._model.optimizer.iterations))
        return self._own_fit(
            *args, callbacks=[settled, *callbacks], verbose=verbose if is_first else 0, **settings
        )

    def train_step(self, data: Any) -> Any:
        """One step of all processes on a batch that all of them have."""
        keras, model = load_keras(), self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        trainer = self._opened()
        lr, drawn = float(model.optimizer.learning_rate), torch.get_rng_state()
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        part, _, rows = own_rows((x, y, weights), trainer.lanes, trainer.lane)
        trackers = _trackers(model)
        kept = [[variable.value.clone() for variable in tracker.variables] for tracker in trackers]
        loss = trainer.step(_as_batch(*part))
        torch.set_rng_state(drawn)  # a step's numbers are its own; what is shuffled next follows from fit's
        with torch.no_grad():
            model.optimizer._iterations.assign_add(1)
            model._loss_tracker.update_state(loss, sample_weight=rows)
            for tracker, values in zip(trackers, kept, strict=True):
                for variable, value in zip(tracker.variables, values, strict=True):
                    variable.assign(value)
                tracker.update_state(trainer.loss_parts[tracker.name], sample_weight=rows)
            return model.compute_metrics(x, y, self._output, sample_weight=weights)

    def _opened(self) -> Trainer:
        if self._trainer is None:
            # Keras has built the model by now: it has seen a batch.
            self._module = as_module(self._model)
            self._loss.learn(self._model, dtype_of(self._model))
            task = Task(
                model=lambda: self._module,
                optimizer=self._optimizer,
                loss=self._told,
                # Keras has the data; what a step takes is what `train_step` gives it.
                train=[(torch.zeros(1), torch.zeros(1))] * _MANY,
                batch_size=_MANY,
            )
            self._trainer = Trainer(task, strategy=self._strategy)
        return self._trainer

    def _optimizer(self, params: Any) -> Any:
        assert self._module is not None
        known = variables_of(self._module)
        return as_torch(self._model.optimizer, params, [known[id(param)] for param in params])

    def _told(self, output: Any, target: Any) -> Any:
        """The loss; beside it, all processes' outputs are kept for the metrics."""
        keras = load_keras()
        self._output = keras.tree.map_structure(lambda each: gather(each.detach()), output)
        return self._loss(output, target)

    def _settle(self) -> None:
        """Let Keras's variables be the committed ones, moving statistics among them."""
        if self._trainer is None:
            return
        self._trainer.settle()
        for part in self._trainer.model.modules():
            if isinstance(part, KerasOperation):
                for bound in part.bound:
                    bound.refresh()


def own_rows(batch: Any, lanes: int, lane: int) -> tuple[Any, int, int]:
    """One process's rows of a batch that all have; how many these are, and how many there are."""
    tree = load_keras().tree
    rows = next(each for each in tree.flatten(batch) if each is not None).shape[0]
    if rows < lanes:
        raise TaskError(
            f"shoal.keras.distribute: a batch of {rows} samples cannot be cut for {lanes} processes; choose "
            "another batch_size."
        )
    own = np.array_split(np.arange(rows), lanes)[lane]
    part = tree.map_structure(lambda each: None if each is None else each[own[0] : own[-1] + 1], batch)
    return part, len(own), rows


def _trackers(model: Any) -> list[Any]:
    """The means of each output's own loss, which a pass begins anew for its part of a batch."""
    found = [] if model._compile_loss is None else list(model._compile_loss.metrics)
    return found if len(found) > 1 else []


def _as_batch(x: Any, y: Any, weights: Any) -> Any:
    inputs = tuple(x) if isinstance(x, (list, tuple)) else x
    target = tuple(y) if isinstance(y, (list, tuple)) else y
    return (inputs, target) if weights is None else (inputs, {TARGET: target, WEIGHTS: weights})
