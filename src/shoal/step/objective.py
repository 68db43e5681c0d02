"""A loss of model and batch where no process has all of the model: asked first what it calls the model with, and
then given what the model makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from shoal.errors import TaskError
from shoal.model.replica import Arguments, Replica
from shoal.spec import Task
from shoal.step.compute import ToldLoss, split_batch, told_loss


def inputs_of(task: Task, batch: Any, key: int = 0) -> Any:
    """What the model is called with for a batch. `key`: that of the random numbers that an objective draws, which
    must be the same at all who compute a batch together."""
    if task.objective is None:
        return split_batch(batch)[0]
    with _drawn_from(key):
        try:
            task.objective(AskedModel(), batch)
        except ModelAsked as asked:
            return asked.arguments
    raise TaskError(
        "Task: objective= has not called the model, but where the model is cut it must do so, once, as "
        "model(…); use data, sharded or ps."
    )


def loss_from(replica: Replica, output: Any, batch: Any, key: int = 0) -> ToldLoss:
    """The loss of a batch of which the model has made this; the same `key` as before."""
    task = replica.task
    if task.objective is None:
        assert task.loss is not None
        return told_loss(replica, task.loss(output, split_batch(batch)[1]))
    with _drawn_from(key):
        return told_loss(replica, task.objective(AnsweringModel(output), batch))


class ModelAsked(Exception):
    """An objective has called the model."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments


class CutModelAsked(TaskError, AttributeError):
    """For what it does not have. Who asks with a default, as in `getattr(model, "module", model)`, gets that."""


class AskedModel:
    """Stands for a model of which parts are elsewhere: it can be called, and nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelAsked(Arguments(args, kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        raise CutModelAsked(
            f"Task: objective= asks the model for {name!r}, but where the model is cut it can only be called, as "
            "model(…); use data, sharded or ps."
        )


class AnsweringModel(AskedModel):
    """Has made its output already."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_called:
            raise TaskError(
                "Task: objective= calls the model twice, but where the model is cut it can do so once; put what "
                "it calls it with into one batch, or use data, sharded or ps."
            )
        self._is_called = True
        return self._output


@contextmanager
def _drawn_from(key: int) -> Iterator[None]:
    """Random numbers of the host that follow from the key alone; then all goes on where it was."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
