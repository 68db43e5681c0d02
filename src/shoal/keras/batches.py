"""Keras's own `fit` in several processes, each of which computes a part of every batch.

In `train_step` each process takes its rows, and a `Trainer` makes the step of all; outputs are gathered in the
same pass, so every process has the losses and metrics of the whole batch, and callbacks see the same numbers
everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.errors import TaskError
from shoal.keras.audience import Audience
from shoal.keras.home import Compiled, KerasHome, Once, values_of
from shoal.keras.installed import load_keras
from shoal.keras.loss import TARGET, WEIGHTS, KerasLoss
from shoal.keras.task import dtype_of
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
        self._home: KerasHome | None = None
        self._report = Once()
        self._compiled: Compiled | None = None
        """With what the trainer was made."""
        self._trainer: Trainer | None = None
        self._state: dict[str, Any] | None = None
        """Of a trainer that was closed, whose optimizer goes on."""
        self._is_home = True
        """Whether Keras's variables have tensors of their own."""
        self._is_seen = True
        """Whether somebody looks at the model after each step."""
        self._loss = KerasLoss(None)
        self._output: Any = None

    def fit(self, *, audience: Audience, verbose: Any, **settings: Any) -> Any:
        """As Keras's own."""
        keras, model = load_keras(), self._model
        if self._compiled is not None and not self._compiled.is_still_that_of(model):
            self._close_trainer()
        back = keras.callbacks.LambdaCallback(
            on_test_begin=lambda *_: self._take_home(), on_epoch_end=lambda *_: self._take_home()
        )
        # Who shuffles draws from torch, and all must draw the same.
        torch.manual_seed(int(model.optimizer.iterations))
        self._is_seen = audience.hears_batches
        try:
            return self._own_fit(
                callbacks=[back, *audience.callbacks],
                verbose=verbose if audience.is_first else 0,
                **settings,
            )
        finally:
            self._is_seen = True

    def train_step(self, data: Any) -> Any:
        """One step of all processes on a batch that all of them have."""
        keras, model = load_keras(), self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(
            keras.tree.map_structure(
                lambda each: None if each is None else keras.ops.convert_to_tensor(each), data
            )
        )
        trainer = self._opened()
        if self._is_home:
            self._send(trainer)
        lr, drawn = float(model.optimizer.learning_rate), torch.get_rng_state()
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        part, _, rows = own_rows((x, y, weights), trainer.lanes, trainer.lane)
        trackers = _trackers(model)
        kept = [[variable.value.clone() for variable in tracker.variables] for tracker in trackers]
        self._is_home = False
        loss = trainer.step(_as_batch(*part))
        torch.set_rng_state(drawn)  # a step's numbers are its own; what is shuffled next follows from fit's
        with torch.no_grad():
            model.optimizer._iterations.assign_add(1)
            model._loss_tracker.update_state(loss, sample_weight=rows)
            for tracker, values in zip(trackers, kept, strict=True):
                for variable, value in zip(tracker.variables, values, strict=True):
                    variable.assign(value)
                tracker.update_state(trainer.loss_parts[tracker.name], sample_weight=rows)
            told = model.compute_metrics(x, y, self._output, sample_weight=weights)
        if self._is_seen:
            self._take_home()
        return told

    def close(self) -> None:
        """Leave the other processes, with the values of all."""
        self._close_trainer()

    def _opened(self) -> Trainer:
        if self._trainer is None:
            # Keras has built the model by now: it has seen a batch.
            self._home, self._compiled = KerasHome(self._model), Compiled(self._model)
            self._loss = KerasLoss(None)
            self._loss.learn(self._model, dtype_of(self._model))
            task = Task(
                model=self._home.make,
                optimizer=self._home.optimizer,
                loss=self._told,
                # Keras has the data; what a step takes is what `train_step` gives it.
                train=[(torch.zeros(1), torch.zeros(1))] * _MANY,
                batch_size=_MANY,
            )
            self._trainer = Trainer(task, strategy=self._strategy, report=self._report)
            self._home.send(self._trainer, self._state)
            self._state = None
        return self._trainer

    def _told(self, output: Any, target: Any) -> Any:
        """The loss; beside it, all processes' outputs are kept for the metrics."""
        keras = load_keras()
        self._output = keras.tree.map_structure(lambda each: gather(each.detach()), output)
        return self._loss(output, target)

    def _send(self, trainer: Trainer) -> None:
        """What somebody has changed since the last step counts; where processes differ, the first one's."""
        assert self._home is not None
        is_changed = self._home.is_changed(values_of(trainer.model))
        if trainer.hear_first("changed" if is_changed else ""):
            state = trainer.state_dict()
            self._home.forget()
            self._home.send(trainer, state)

    def _take_home(self) -> None:
        """Let Keras's variables have the committed values, moving statistics among them."""
        if self._trainer is not None and self._home is not None and not self._is_home:
            self._trainer.settle()
            self._home.take(values_of(self._trainer.model))
            self._is_home = True

    def _close_trainer(self) -> None:
        """The next one goes on with the optimizer's state, where that is still the model's."""
        if self._trainer is None or self._compiled is None:
            return
        self._take_home()
        if self._compiled.optimizer is self._model.optimizer:
            self._state = self._trainer.state_dict()
        self._trainer.close()
        self._trainer = None


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
