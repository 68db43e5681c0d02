"""Training state cut over workers that share memory: what others would be sent, they find where it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.model.parking.parked import Values
from shoal.spec import Mesh
from shoal.step.direct import leave, write_directly
from shoal.step.tap import GradientTap
from shoal.strategies.mesh.sharded.hooks import GradientHooks
from shoal.strategies.mesh.sharded.sharding import PlannedUnit, StateSharding
from shoal.strategies.mesh.sharded.shared_vector import SharedVector, share_rooms
from shoal.strategies.mesh.sharded.unit import ShardedUnit


class SharedSharding(StateSharding):
    """Levels 2 and 3: parameters lie once in the host's memory, and gradients pass through room for two of the
    largest vectors. Since nothing is saved by letting parameters go, they stay."""

    def _make_units(self, planned: Iterable[PlannedUnit], mesh: Mesh, values: Values) -> list[ShardedUnit]:
        planned = list(planned)
        groups = [group for plan in planned for group in plan.groups]
        looks = [(next(iter(params.values())).dtype, sum(cut.numels)) for params, cut in groups]
        rooms = share_rooms(looks, self._axis, self._level)
        self._shared = [
            SharedVector(params, cut, self._axis, values, room)
            for (params, cut), room in zip(groups, rooms, strict=True)
        ]
        self._axis.barrier()  # the first has filled them
        vectors = iter(self._shared)
        return [
            ShardedUnit(plan.block.modules, plan.params, [next(vectors) for _ in plan.groups]) for plan in planned
        ]

    def _kind(self, unit: ShardedUnit) -> type[GradientHooks]:
        return GradientHooks

    def refresh(self) -> None:
        for unit in self._units:
            unit.forget_gradients()
        self._axis.barrier()  # all owners have written


class SharedFirstLevel(SharedSharding):
    """Level 1: autograd leaves gradients where their owners read them, as under `data`."""

    def __init__(
        self,
        module: nn.Module,
        trained: Mapping[str, nn.Parameter],
        axis: Group,
        mesh: Mesh,
        *,
        whole: Collection[str],
        values: Values,
    ) -> None:
        super().__init__(module, trained, axis, mesh, whole=whole, values=values)
        self._views = {name: view for vector in self._shared for name, view in vector.gradient_views().items()}
        self._params = [trained[name] for name in self._views]
        self._numbers = {name: number for number, name in enumerate(self._views)}
        self._touched = np.zeros(len(self._params), dtype=np.uint8)
        self._tap = GradientTap(self._params)
        # A pipeline's stages have passes of their own, which the tap does not begin.
        self._direct = write_directly(module, self._params, self._tap) if mesh.pipeline == 1 else []
        self.backward = self._tap.backward

    @contextmanager
    def in_use(self) -> Iterator[None]:
        views = list(self._views.values())
        self._tap.aim(views, self._touched)
        yield
        for number, param in enumerate(self._params):
            if param.grad is not None:  # from a pass that calls no hooks: that of weights alone, in zero-bubble
                before = views[number] if self._touched[number] else 0.0
                torch.add(param.grad.to_dense(), before, out=views[number])
                param.grad, self._touched[number] = None, 1

    def has_gradient(self, name: str) -> bool:
        return super().has_gradient(name) if name in self._whole else bool(self._touched[self._numbers[name]])

    def reduce(self, names: Iterable[str]) -> None:
        wanted = set(names)
        self._sum_whole(wanted)
        for name, view in self._views.items():
            if name in wanted and not self._touched[self._numbers[name]]:
                view.zero_()  # others have a gradient for it
        self._axis.barrier()  # all gradients of the step are where they belong
        for vector in self._shared:
            if wanted & vector.parts.keys():
                vector.add_up()
            vector.hand_out(wanted)

    def close(self) -> None:
        self._tap.close()
        leave(self._direct)
