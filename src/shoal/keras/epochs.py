"""Keras's `fit` under strategies that train the task's own data: an epoch at a time, each a `Trainer.fit`.

A strategy that leases parts of the data, cuts the model, or lets workers train apart takes no batches from a loop
of Keras's. So each epoch is a task by itself that goes on where the last one ended. Between epochs every process
has Keras's own model with the weights of all: evaluation and callbacks are Keras's, and what a callback changes
(weights, learning rate, whether to stop) counts in the next epoch.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.model_file import load_tensors
from shoal.keras.audience import Audience
from shoal.keras.fit_data import FitData
from shoal.keras.home import Compiled, KerasHome, Once
from shoal.keras.installed import load_keras
from shoal.keras.loss import CompiledMetric, KerasLoss, metrics_of
from shoal.keras.optimizers import KerasSchedule, schedule_of
from shoal.keras.task import dtype_of
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import Callback, CallbackContext, Task
from shoal.spec.task import MOST_LOSS_PARTS


class EpochFit:
    """What a distributed model has in the place of its own `fit`, where it trains by epochs."""

    def __init__(self, model: Any, strategy: str) -> None:
        self._model = model
        self._strategy = strategy
        self._steps = self._epochs = self._samples = 0
        """Of this `fit`, so far."""
        self._state: dict[str, Any] | None = None
        """Of training, after the last step."""
        self._before = 0
        """Updates that Keras counts of the time before this `fit`."""
        self._home: KerasHome | None = None
        self._report = Once()
        self._compiled: Compiled | None = None
        """With what the last `fit` trained."""

    def close(self) -> None:
        """Every epoch has left what it used."""

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        validation_data: Any = None,
        class_weight: Any = None,
        initial_epoch: int = 0,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        audience: Audience,
        **settings: Any,
    ) -> Any:
        """As Keras's own."""
        keras, model = load_keras(), self._model
        data = FitData.of(x, y, batch_size, validation_data=validation_data, **settings)
        data.build(model)
        self._home = KerasHome(model)
        heard = keras.callbacks.CallbackList(
            audience.callbacks, add_history=True, add_progbar=verbose != 0 and audience.is_first,
            verbose=verbose if audience.is_first else 0, epochs=epochs, steps=data.steps, model=model,
        )  # fmt: skip
        model.stop_training, logs = False, {}
        heard.on_train_begin()  # which may restore a backup, and say where it goes on
        self._begin_anew(data)
        loss = FitLoss(model, class_weight)
        for epoch in range(model._initial_epoch or initial_epoch, epochs):
            model.reset_metrics()
            heard.on_epoch_begin(epoch)
            logs = self._train(data, loss, heard)
            if data.validation is not None and model._should_eval(epoch, validation_freq):
                val_x, val_y, val_weights = data.validation
                found = model.evaluate(
                    val_x, val_y, sample_weight=val_weights, steps=validation_steps, callbacks=heard,
                    batch_size=validation_batch_size or data.batch_size, return_dict=True,
                )  # fmt: skip
                logs |= {f"val_{name}": value for name, value in found.items()}
            heard.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        heard.on_train_end(logs)
        return model.history

    def _begin_anew(self, data: FitData) -> None:
        """Each `fit` is a run of its own, whose optimizer has what the last one left."""
        model = self._model
        if self._compiled is None or not self._compiled.is_still_that_of(model):
            if self._compiled is not None and self._compiled.optimizer is not model.optimizer:
                self._state = None
            self._compiled = Compiled(model)
        self._before = int(model.optimizer.iterations)
        self._steps = self._epochs = self._samples = 0
        if self._state is not None:
            position = {"batch_size": data.batch_size, "length": len(data.train), "seed": self._before}
            facts = {**self._state["facts"], **position, "evaluations": {}}
            self._state |= {"step": 0, "losses": [], "facts": facts}

    def _train(self, data: FitData, loss: FitLoss, heard: Any) -> dict[str, float]:
        """An epoch of all processes; its losses and metrics."""
        home = self._home
        assert home is not None
        batches = _Batches(heard, self._model, self._steps, self._samples)
        home.forget()
        task = self._task(data, loss, batches, home)
        with (
            tempfile.TemporaryDirectory(prefix="shoal-keras-") as own,
            Trainer(task, strategy=self._strategy, report=self._report, serves=True) as trainer,
        ):
            home.send(trainer, self._state)
            self._state = None
            folder = Path(trainer.hear_first(own))
            outcome = trainer.fit()
            self._take_home(trainer, folder, home)
            logs = self._logs_of_first(trainer, folder, batches.logs)
        self._epochs, self._steps, self._samples = self._epochs + 1, outcome.step, batches.seen
        self._model.optimizer._iterations.assign(self._before + self._steps)
        return logs

    def _task(self, data: FitData, loss: FitLoss, batches: _Batches, home: KerasHome) -> Task:
        rate = schedule_of(self._model.optimizer)
        return data.task(
            self._steps,
            self._epochs,
            model=home.make,
            optimizer=home.optimizer,
            scheduler=None if rate is None else lambda each: KerasSchedule(each, lambda n: rate(n + self._before)),
            loss=loss,
            callbacks=[batches],
            seed=self._before,
        )

    def _take_home(self, trainer: Trainer, folder: Path, home: KerasHome) -> None:
        """Keras's variables get the weights of all; the next epoch gets what the optimizer has."""
        self._state = trainer.state_dict()
        path = folder / "end.safetensors"
        trainer.save(path)
        trainer.hear_first()
        home.take(load_tensors(path))
        trainer.hear_first()  # until then the first keeps the file

    def _logs_of_first(self, trainer: Trainer, folder: Path, logs: dict[str, float]) -> dict[str, float]:
        """The same for all: other processes may know less of the others' batches."""
        path = folder / "logs.json"
        if trainer.world.is_first:
            path.write_text(json.dumps(logs))
        trainer.hear_first()
        found: dict[str, float] = json.loads(path.read_text())
        trainer.hear_first()
        return found


class FitLoss:
    """The compiled loss, told with those metrics that are means over samples."""

    def __init__(self, model: Any, class_weight: Any) -> None:
        self._loss = KerasLoss(class_weight)
        self._loss.learn(model, dtype_of(model))
        parts = len(model._compile_loss.metrics) if model._compile_loss is not None else 0
        means = {name: metric for name, metric in metrics_of(model).items() if metric.is_mean}
        room = max(0, MOST_LOSS_PARTS - (parts if parts > 1 else 0))
        self._metrics: dict[str, CompiledMetric] = dict(list(means.items())[:room])

    def __call__(self, output: Any, target: Any) -> Any:
        told = self._loss(output, target)
        told = dict(told) if isinstance(told, dict) else {"loss": told}
        with torch.no_grad():
            for name, metric in self._metrics.items():
                told[name] = torch.tensor(metric(output, target), dtype=torch.float64)
        return told if len(told) > 1 else told["loss"]


class _Batches(Callback):
    """Keras's callbacks hear of each batch, in the first process."""

    fatal = True

    def __init__(self, heard: Any, model: Any, steps: int, samples: int) -> None:
        """`steps`, `samples`: of the epochs before."""
        self._heard, self._model, self._before = heard, model, steps
        self._sums: dict[str, float] = {}
        self._samples, self.seen = 0, samples

    @property
    def logs(self) -> dict[str, float]:
        """Means over all samples of the epoch so far."""
        return {name: total / max(1, self._samples) for name, total in self._sums.items()}

    def on_step(self, context: CallbackContext) -> None:
        number, count = context.step - self._before - 1, context.samples - self.seen
        self.seen, self._samples = context.samples, self._samples + count
        for name, value in {"loss": context.loss, **context.parts}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * count
        self._heard.on_train_batch_begin(number)
        self._heard.on_train_batch_end(number, self.logs)
        if self._model.stop_training:
            context.stop()
