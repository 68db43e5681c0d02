"""Horovod's callbacks for Keras's `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.horovod.keras.functions import allreduce, broadcast_variables, variables_of_training
from shoal.horovod.runtime import ProcessSet, current, global_process_set
from shoal.keras.installed import load_keras

_Callback: Any = load_keras().callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):
    """All ranks begin with the root's weights, and with what its optimizer keeps."""

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._process_set = process_set
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras has built both by now, but for models that it cannot build without a batch."""
        if self.model.built and self.model.optimizer.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """At the latest now, as with Horovod."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        if not self._is_done:
            broadcast_variables(variables_of_training(self.model), self.root_rank, self._process_set)
        self._is_done = True


class MetricAverageCallback(_Callback):
    """What an epoch ends with is the mean of all ranks, for the history and for callbacks that come after."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In place, in an order that all ranks have."""
        if not logs:
            return
        names = sorted(logs)
        values = np.array([float(logs[name]) for name in names], dtype=np.float64)
        # Named by the metrics: ranks that have different ones are told so.
        means = allreduce(values, name=f"metrics.{'.'.join(names)}", process_set=self._process_set)
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):
    """From one epoch to another the learning rate is `initial_lr * multiplier(epoch)`, or times a number.

    With `staircase` it changes at each epoch's begin; without, at each batch, by parts of an epoch.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase if callable(multiplier) else True
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier if callable(multiplier) else lambda _: float(multiplier)
        self._epoch = 0
        self._own_momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """How many batches an epoch has, where that was not said."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """From here on."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The correction is for one batch."""
        if self._own_momentum is not None:
            self.model.optimizer.momentum = self._own_momentum
            self._own_momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For the history."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self._multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum and old:
            # Keras keeps steps, not gradients: those of the old rate would go on at the new one's size.
            self._own_momentum = momentum
            optimizer.momentum = momentum * new / old


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from that of one rank, `initial_lr / size`, to `initial_lr`, batch by batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            size = current().world.world_size
            # A batch further, so that the last one of the warm-up has the whole rate.
            return 1 / size * ((epoch + 1 / self.steps_per_epoch) * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """For the history, and a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
