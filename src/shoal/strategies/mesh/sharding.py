"""What the shard axis does with this process's part of the model: who keeps and updates which elements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.model.parking.parked import Values
from shoal.spec import Mesh
from shoal.step.compute import Backward
from shoal.strategies.mesh.held import HeldSpan


class Sharding(Protocol):
    """Trained parameters by name in the task's model. All in the row make the same calls in the same order."""

    backward: Backward
    """How a pass runs whose gradients are the step's, where it is one from the loss to all parameters."""

    def part(self, name: str) -> torch.Tensor:
        """What the optimizer of this process updates: a leaf tensor, empty where nothing of it is kept here."""

    def spans(self, name: str) -> tuple[HeldSpan, ...]:
        """By worker of the row: the elements that it keeps; none where all keep all."""

    def in_use(self) -> AbstractContextManager[None]:
        """The model runs, forward or back, only within this; in what order and how often is each lane's own
        business. Who leaves waits until all do."""

    def has_gradient(self, name: str) -> bool:
        """Whether the backward passes of this step have left a gradient."""

    def gradient(self, name: str) -> torch.Tensor:
        """The whole gradient that they have left, for a parameter of which all keep all; zeros where none."""

    def reduce(self, names: Iterable[str]) -> None:
        """Sum the gradients of these over the row: then `part(name).grad` is this process's part of the sum.
        Whoever has none for one of them adds nothing; the parts of all others have no gradient."""

    def refresh(self) -> None:
        """The optimizer has taken its step: the next forward pass finds the new values."""

    def close(self) -> None:
        """Nothing runs any more; what is here stays as it is."""


def make_sharding(
    module: nn.Module,
    trained: Mapping[str, nn.Parameter],
    axis: Group,
    mesh: Mesh,
    *,
    whole: Collection[str],
    values: Values,
    is_limited: bool,
) -> Sharding:
    """Cut the parameters over an axis; those named in `whole` are kept by all. `values` gives those of a parameter
    that has none in memory yet. `is_limited`: a worker may not have all parameters in its address space."""
    if axis.size == 1:
        return Unsharded(trained)
    if not axis.shares_memory or is_limited or any(param.device.type != "cpu" for param in trained.values()):
        from shoal.strategies.mesh.sharded.sharding import StateSharding

        return StateSharding(module, trained, axis, mesh, whole=whole, values=values)
    from shoal.strategies.mesh.sharded.shared import SharedFirstLevel, SharedSharding

    made = SharedFirstLevel if mesh.level == 1 else SharedSharding
    return made(module, trained, axis, mesh, whole=whole, values=values)


class Unsharded:
    """The shard axis is one long: this process keeps all that it has."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.backward: Backward = torch.Tensor.backward
        self._trained = trained

    def part(self, name: str) -> torch.Tensor:
        return self._trained[name]

    def spans(self, name: str) -> tuple[HeldSpan, ...]:
        return ()

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_gradient(self, name: str) -> bool:
        return self._trained[name].grad is not None

    def gradient(self, name: str) -> torch.Tensor:
        param = self._trained[name]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        return param.grad

    def reduce(self, names: Iterable[str]) -> None:
        for name in names:
            self.gradient(name)

    def refresh(self) -> None:
        """The optimizer has worked on the parameters themselves."""

    def close(self) -> None:
        """Nothing was done to the model."""
