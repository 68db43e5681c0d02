"""A process's one replica, which its places have in turn: what each has of its own is put aside meanwhile.

Values are copied, because others keep hold of the tensors that they lie in; what the optimizer keeps changes hands
as it is. A process with one place copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shoal.model.buffers import moving_buffers
from shoal.model.half_range import HalfState
from shoal.model.optimizer.kinds import settings_of, state_schema
from shoal.model.optimizer.whole_state import MovedSettings
from shoal.model.replica import Replica


class PutAside(NamedTuple):
    """What a place has while another one has the replica, besides its values."""

    kept: dict[Any, Any]
    """What the optimizer keeps."""
    half: HalfState
    moved: Any
    beside: Any
    """What whoever uses the replica keeps for the place."""


class CommonReplica:
    """The replica, and which place has it now."""

    def __init__(self, replica: Replica) -> None:
        self.owner: int | None = None
        """Nobody: it holds what is of no use any more."""
        self.moved = MovedSettings(replica.optimizer) if state_schema(replica.optimizer) is None else None
        """Of optimizers that change their own settings: those of the place that has the replica."""
        self._replica = replica
        self._first_half = replica.precision.state
        self._values: dict[int, list[torch.Tensor]] = {}
        self._aside: dict[int, PutAside] = {}

    def put_aside(self, beside: Any = None) -> None:
        """Put aside what the place has that is here; the optimizer keeps nothing then."""
        state = self._replica.optimizer.state
        if self.owner is not None:
            own = self._tensors()
            values = self._values.setdefault(self.owner, [])
            values += [torch.empty_like(one) for one in own[len(values) :]]
            _copy(values, own)
            moved = None if self.moved is None else self.moved.plain()
            self._aside[self.owner] = PutAside(dict(state), self._replica.precision.state, moved, beside)
        state.clear()
        self._replica.precision.adopt(self._first_half)
        if self.moved is not None:
            self.moved.forget()
        self.owner = None

    def become(self, place: int) -> None:
        """The replica as it is now becomes a place's own."""
        self.owner = place

    def return_to(self, place: int) -> Any:
        """Give a place the replica with all that it had, after nobody had it; what was kept beside that."""
        found = self._aside.pop(place)
        _copy(self._tensors(), self._values[place])
        self._replica.optimizer.state.update(found.kept)
        self._replica.precision.adopt(found.half)
        if self.moved is not None:
            self.moved.adopt(found.moved)
        self.owner = place
        return found.beside

    def leave(self, place: int) -> None:
        """A place is another process's from now on."""
        self._aside.pop(place, None)
        self._values.pop(place, None)
        if self.owner == place:
            self.owner = None
            self.put_aside()

    @contextmanager
    def precision_of(self, place: int) -> Iterator[None]:
        """In this block the replica computes in the numbers that this place does, whoever has it."""
        precision = self._replica.precision
        own = precision.state
        if place != self.owner:
            precision.adopt(self._aside[place].half)
        try:
            yield
        finally:
            precision.adopt(own)

    def settings(self) -> list[dict[str, Any]]:
        """By group: the optimizer's settings that its own steps do not change."""
        if self.moved is not None:
            return self.moved.others()
        return [settings_of(group) for group in self._replica.optimizer.param_groups]

    def _tensors(self) -> list[torch.Tensor]:
        trained = [param.detach() for param in self._replica.trained.values()]
        return [*trained, *moving_buffers(self._replica.module)]


@torch.no_grad()
def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    for room, tensor in zip(to, of, strict=True):
        room.copy_(tensor)
