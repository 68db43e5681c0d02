"""Training state cut over the workers of the shard axis (ZeRO): who keeps what, and when it moves.

Level 1 cuts the optimizer's state: gradients go to their owners after all backward passes. Level 2 cuts gradients,
too: those of a unit (a block of layers) go to their owners as soon as its backward pass is complete. Level 3 cuts
parameters, too: a unit is whole only while its layers run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.layout.state_cuts import CutParameter, StateCut, cut_state
from shoal.model.parking.parked import Values
from shoal.spec import Mesh
from shoal.step.compute import Backward
from shoal.strategies.mesh.held import HeldSpan
from shoal.strategies.mesh.sharded.agreement import UseAgreement
from shoal.strategies.mesh.sharded.blocks import ShardedBlock, find_blocks
from shoal.strategies.mesh.sharded.hooks import GradientHooks, ParameterHooks, RootHooks
from shoal.strategies.mesh.sharded.unit import ShardedUnit
from shoal.strategies.mesh.sharded.vector import Vector
from shoal.strategies.mesh.summing import sum_flat

_Params = dict[str, nn.Parameter]


@dataclass(frozen=True)
class PlannedUnit:
    """A block of layers, and its parameters by dtype, each with its cut."""

    block: ShardedBlock
    groups: Sequence[tuple[_Params, StateCut]]

    @property
    def params(self) -> _Params:
        return {name: param for params, _ in self.groups for name, param in params.items()}


class StateSharding:
    """Implements `Sharding`. Lanes may use the units of levels 2 and 3 in any order, and as often as they like,
    while they are within `in_use`; what all use in the same order costs the least."""

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
        self.backward: Backward = torch.Tensor.backward
        self._axis = axis
        self._level = mesh.level
        self._whole = {name: param for name, param in trained.items() if name in whole}
        cut = {name: param for name, param in trained.items() if name not in whole}
        self._units = self._make_units(plan_units(find_blocks(module, cut), cut, axis.size, mesh), mesh, values)
        self._vectors = {name: vector for unit in self._units for vector in unit.vectors for name in vector.parts}
        self._unit_of = {name: unit for unit in self._units for name in unit.params}
        self._agreement = UseAgreement(self._units, axis)
        self._hooks = self._place_hooks()

    def _make_units(self, planned: Iterable[PlannedUnit], mesh: Mesh, values: Values) -> list[ShardedUnit]:
        units = []
        for plan in planned:
            vectors = [
                Vector(params, cut, self._axis, values, apart=_apart(params, mesh)) for params, cut in plan.groups
            ]
            units.append(ShardedUnit(plan.block.modules, plan.params, vectors))
            if mesh.level == 3:
                units[-1].let_go()  # at once: this process may not hold all of them
        return units

    def _place_hooks(self) -> list[GradientHooks]:
        if self._level == 1:
            return []
        return [self._kind(unit)(number, unit, self._agreement) for number, unit in enumerate(self._units)]

    def _kind(self, unit: ShardedUnit) -> type[GradientHooks]:
        if self._level == 2:
            return GradientHooks
        return ParameterHooks if unit.modules else RootHooks

    def part(self, name: str) -> torch.Tensor:
        return self._whole[name] if name in self._whole else self._vectors[name].parts[name]

    def spans(self, name: str) -> tuple[HeldSpan, ...]:
        return () if name in self._whole else self._vectors[name].spans[name]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        for hooks in self._hooks:
            hooks.begin()
        yield
        for hooks in self._hooks:
            hooks.finish()
        if self._hooks:
            self._agreement.help_others()

    def has_gradient(self, name: str) -> bool:
        if name in self._whole:
            return self._whole[name].grad is not None
        unit = self._unit_of[name]
        return name in unit.touched or unit.params[name].grad is not None

    def gradient(self, name: str) -> torch.Tensor:
        param = self._whole[name]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        return param.grad

    def reduce(self, names: Iterable[str]) -> None:
        wanted = set(names)
        self._sum_whole(wanted)
        for unit in self._units:
            if self._level == 1 and wanted & unit.params.keys():
                unit.reduce()
            unit.hand_out(wanted)

    def _sum_whole(self, wanted: Collection[str]) -> None:
        sum_flat([self.gradient(name) for name in self._whole if name in wanted], self._axis)

    def refresh(self) -> None:
        for unit in self._units:
            unit.forget_gradients()
            if self._level < 3:
                unit.gather()

    def close(self) -> None:
        for hooks in self._hooks:
            hooks.remove()


def plan_units(
    blocks: Iterable[ShardedBlock], params: Mapping[str, nn.Parameter], workers: int, mesh: Mesh
) -> list[PlannedUnit]:
    """Each block's parameters, by dtype, and how they are cut over the axis."""
    kept = [block for block in blocks if block.names]
    groups = [_by_dtype({name: params[name] for name in block.names}) for block in kept]
    sizes = [
        [CutParameter(layer=name.rpartition(".")[0], numel=param.numel()) for name, param in group.items()]
        for by_dtype in groups
        for group in by_dtype
    ]
    cuts = iter(cut_state(sizes, workers=workers, policy=mesh.policy, capacities=mesh.capacities))
    return [
        PlannedUnit(block, [(group, next(cuts)) for group in by_dtype])
        for block, by_dtype in zip(kept, groups, strict=True)
    ]


def _by_dtype(params: _Params) -> list[_Params]:
    groups: dict[tuple[torch.dtype, torch.device], _Params] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.device), {})[name] = param
    return list(groups.values())


def _apart(params: _Params, mesh: Mesh) -> str | None:
    """Where a worker's part lies: in the host's memory if asked, with the vector if that stays, else beside it."""
    device = next(iter(params.values())).device
    if mesh.offload and device.type != "cpu":
        return "cpu"
    return str(device) if mesh.level == 3 else None
