"""`distribute`: Keras's `fit` in several processes that run the same script.

Where a step can be given its batches, the loop is Keras's own (`batches.py`); else each epoch is trained as a task
(`epochs.py`). A model that makes its steps itself does so in every process (`own_step.py`). Every process has the
same numbers, and its callbacks decide the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shoal.errors import TaskError
from shoal.keras.audience import Audience, is_first_process
from shoal.keras.batches import BatchFit
from shoal.keras.epochs import EpochFit
from shoal.keras.installed import load_keras
from shoal.keras.own_step import OwnStepFit
from shoal.roles.process.station import current_station
from shoal.roles.trainer.step import why_no_step
from shoal.spec import Cluster, Job, World, parse_strategy

_OWNER = "shoal.keras.distribute"
_WRITERS = ("export", "save", "save_weights")
"""Methods of a model that write files."""


def distribute(model: Any, *, strategy: str = "data") -> Any:
    """The same compiled model, whose `fit` trains together with the other processes that run this script.

    Start it with `shoal run --workers 2 script.py`, or torchrun. Batches are those of one process: `batch_size` is
    that of all processes together.
    """
    keras = load_keras()
    if not isinstance(model, keras.Model) or not model.compiled:
        found = "one that is not compiled" if isinstance(model, keras.Model) else type(model).__name__
        raise TaskError(f"{_OWNER}: a compiled Keras model is needed, found {found}; call its compile() first.")
    if model.optimizer.use_ema:
        raise TaskError(
            f"{_OWNER}: use_ema overwrites the weights by averages at the end of fit, which each process has a "
            "part of; use Task.from_keras with ema=."
        )
    station = current_station()
    if station is not None and station.has_servers:
        raise TaskError(
            f"{_OWNER}: `shoal run --strategy {station.job.strategy}` starts servers for one Trainer.fit(), but "
            "Keras's fit trains epoch by epoch, each with servers of its own; leave --strategy out, and say "
            f"distribute(model, strategy={station.job.strategy!r})."
        )
    former = getattr(model.__dict__.get("fit"), "__self__", None)
    if isinstance(former, Distribution):
        former.end()
    Distribution(model, _way_of(model, strategy)).begin()
    return model


class WayToFit(Protocol):
    """How a distributed model is trained."""

    @property
    def fit(self) -> Callable[..., Any]:
        """As Keras's own `fit`, with an `audience` in the place of callbacks."""

    def close(self) -> None:
        """Leave the model with the values of all, and as it was before."""


def _way_of(model: Any, strategy: str) -> WayToFit:
    workers = World.from_environment().world_size
    job = Job(target=_OWNER, strategy=str(parse_strategy(strategy)), cluster=Cluster(workers=workers))
    conduct = job.conduct
    takes_batches = not why_no_step(job) and conduct.meets and not conduct.gathers
    if type(model).train_step is load_keras().Model.train_step:
        return BatchFit(model, strategy) if takes_batches else EpochFit(model, strategy)
    if strategy != "data":
        raise TaskError(
            f"{_OWNER}: {type(model).__name__} has a train_step of its own, which makes the update, too, but "
            f"strategy={strategy} would make it otherwise; use strategy='data', or put what is special about it "
            "into compute_loss."
        )
    return OwnStepFit(model)


class Distribution:
    """What a distributed model has in the place of its own `fit` and `save`."""

    def __init__(self, model: Any, way: WayToFit) -> None:
        self._model, self._way = model, way
        self._positions = list(inspect.signature(model.fit).parameters)
        self._writers = {name: getattr(model, name) for name in _WRITERS}

    def begin(self) -> None:
        """From now on Keras calls these. They are no part of what it saves."""
        put = self._model.__dict__
        put["fit"] = self.fit
        put.update((name, partial(self._write, name)) for name in self._writers)

    def end(self) -> None:
        """The model is Keras's own again."""
        self._way.close()
        for name in ("fit", "train_step", *self._writers):
            self._model.__dict__.pop(name, None)

    def fit(self, *args: Any, **settings: Any) -> Any:
        """As Keras's own. The first process shows how it goes, and writes files."""
        settings |= zip(self._positions, args, strict=False)
        audience = Audience.of(settings.pop("callbacks", None))
        return self._way.fit(audience=audience, verbose=settings.pop("verbose", "auto"), **settings)

    def _write(self, name: str, *args: Any, **settings: Any) -> None:
        """As Keras's own, once: the first process writes."""
        if is_first_process():
            self._writers[name](*args, **settings)
