"""What an elastic script keeps: saved at commits, restored after a death, and told to those who come."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shoal.horovod.common.exceptions import HostsUpdatedInterrupt
from shoal.horovod.elastic.place import elastic_world
from shoal.horovod.torch.elastic.sampler import ElasticSampler
from shoal.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from shoal.horovod.torch.mpi_ops import Max, allreduce


class ElasticState:
    """Something to go on from, in whatever world."""

    def __init__(self, **kwargs: Any) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions that are called in every new world, as to change the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """This process is in a new world."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save, so that whatever happens training goes on from here, and see whether workers have come."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks where workers wait to be taken in. All call this together."""
        place = elastic_world()
        if place is not None and int(allreduce(torch.tensor(int(place.has_news)), name="hosts", op=Max)):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep what there is in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Have what the first rank has."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing more, where what is kept does not depend on the world."""


class ObjectState(ElasticState):
    """Plain objects, as attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved_state = dict(kwargs)
        self._set()

    def save(self) -> None:
        """All attributes that it was made with."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """As they were saved."""
        self._set()

    def sync(self) -> None:
        """Have the first rank's."""
        if self._saved_state:
            self.save()
            self._saved_state = broadcast_object(self._saved_state, 0, "elastic.objects")
            self._set()

    def _set(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else; models, optimizers and samplers may have other names, too."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._kept = {name: value for name, value in given.items() if _knows_state(value)}
        self._states: dict[str, Any] = {}
        for name, value in self._kept.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._kept})
        self._keep()

    def save(self) -> None:
        """Copies of all states."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Load the copies."""
        for name, value in self._kept.items():
            value.load_state_dict(copy.deepcopy(self._states[name]))
        super().restore()

    def sync(self) -> None:
        """Have the first rank's, and keep that."""
        for name, value in self._kept.items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, ElasticSampler):
                value.load_state_dict(broadcast_object(value.state_dict(), 0, f"elastic.{name}"))
            else:
                broadcast_optimizer_state(value, 0)
        super().sync()
        self._keep()

    def _keep(self) -> None:
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in self._kept.items()}


def _knows_state(value: object) -> bool:
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | ElasticSampler)
