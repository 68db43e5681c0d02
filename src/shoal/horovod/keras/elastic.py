"""Keras scripts whose world shrinks and grows: `import horovod.keras as hvd`, then `hvd.elastic`."""

from __future__ import annotations

from typing import Any

from shoal.horovod.keras.functions import broadcast_variables, variables_of_training
from shoal.horovod.keras.optimizer import ReducedApply
from shoal.horovod.torch.elastic import ObjectState, run
from shoal.keras.installed import load_keras

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

_Callback: Any = load_keras().callbacks.Callback


class KerasState(ObjectState):
    """A compiled model with its optimizer, and whatever else: `KerasState(model, epoch=0, batch=0)`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is None or not model.built:
            raise ValueError(
                "KerasState takes a model that is compiled and built, so that all ranks have the same variables; "
                "give it an Input, or call model.build, and compile it before."
            )
        if not self.optimizer.built:  # a rank that has come later has trained on nothing
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)
        self._keep()

    def save(self) -> None:
        """Copies of all variables."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """The copies again; passes that had not made an update yet are forgotten."""
        for variable, value in zip(variables_of_training(self.model), self._values, strict=True):
            variable.assign(value)
        if isinstance(self.optimizer.apply, ReducedApply):
            self.optimizer.apply.forget()
        super().restore()

    def sync(self) -> None:
        """Have the first rank's, and keep that."""
        broadcast_variables(variables_of_training(self.model), 0)
        super().sync()
        self._keep()

    def _keep(self) -> None:
        self._values = [variable.value.detach().clone() for variable in variables_of_training(self.model)]


class CommitStateCallback(_Callback):
    """Commits the state after so many batches, and at the end of each epoch. Give it to `fit` behind those that
    update the state."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._every, self._done = state, batches_per_commit, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count anew: the last `fit` may have ended between two commits."""
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One more."""
        self._done += 1
        if self._done % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What has begun is behind this one."""
        self._state.commit()


class UpdateBatchStateCallback(_Callback):
    """`state.batch` is how many batches of the epoch are done, also where `fit` was called for the rest of one."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._begun = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """The first epoch goes on behind those that were done before."""
        self._begun = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One more."""
        self._state.batch = self._begun + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """None of the next."""
        self._state.batch = self._begun = 0


class UpdateEpochStateCallback(_Callback):
    """`state.epoch` is how many epochs are done, where each `fit` counts its own from 0."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._begun = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """So many were done before."""
        self._begun = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One more."""
        self._state.epoch = self._begun + epoch + 1
