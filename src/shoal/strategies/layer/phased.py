"""Groups of layers that take turns: one trains, the others are frozen; the batch is shared by the workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.spec import Data, Layer
from shoal.step.work import Work
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.data.collective import CollectiveData
from shoal.strategies.layer.graph import divide


class PhasedData(CollectiveData):
    """Data parallel over sockets, in which only the parameters of the present phase need a gradient."""

    def __init__(self, spec: Layer, device: str) -> None:
        super().__init__(Data(via="ring" if device == "cpu" else "backend"))
        self._phases = spec

    def open(self, replica: Replica, setting: Setting) -> None:
        if isinstance(replica.optimizer, torch.optim.LBFGS):
            raise SpecError(
                f"LBFGS remembers gradients of the whole model, of which strategy={self._phases} trains a part at "
                "a time; use another optimizer."
            )
        super().open(replica, setting)
        self._groups = layer_groups(replica.module, replica.trained, self._phases.phases)
        if setting.world.is_first:
            for number, group in enumerate(self._groups):
                setting.company.report(
                    f"layer: turn {number + 1} of {len(self._groups)} trains {_described(group)}"
                )

    def take(self, work: Work) -> StepResult:
        phase = phase_of(work.step, self._phases)
        for number, group in enumerate(self._groups):
            for param in group.values():
                param.requires_grad_(number == phase)
        return super().take(work)

    def close(self) -> None:
        for param in self._replica.trained.values():
            param.requires_grad_()
        super().close()


def phase_of(step: int, spec: Layer) -> int:
    """The group that trains in a step; steps count from 1."""
    return (step - 1) // spec.every % spec.phases


def layer_groups(
    module: nn.Module, trained: Mapping[str, torch.Tensor], count: int
) -> list[dict[str, torch.Tensor]]:
    """Trained parameters in so many groups, by the model's children in their order, of about the same size.

    Where the model has too few children, the largest is looked into.
    """
    units = _units(module, "", trained)
    while len(units) < count:
        open_ones = [name for name in units if len(_units(module, name, trained)) > 1]
        if not open_ones:
            raise SpecError(
                f"layer: phases={count} needs as many layers with parameters to train, but the model has "
                f"{len(units)}; use fewer phases."
            )
        largest = max(open_ones, key=lambda name: _size(units[name]))
        inside = _units(module, largest, trained)
        units = {
            name: found
            for unit, params in units.items()
            for name, found in (inside if unit == largest else {unit: params}).items()
        }
    found = list(units.values())
    parts = divide([_size(params) for params in found], count)
    return [{name: p for index in part for name, p in found[index].items()} for part in parts]


def _units(
    module: nn.Module, name: str, trained: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """What a submodule consists of: its children, and its own parameters apart, as far as they are trained."""
    prefix = f"{name}." if name else ""
    children = {f"{prefix}{child}" for child, _ in module.get_submodule(name).named_children()}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for each, param in trained.items():
        if each.startswith(prefix):
            child = prefix + each.removeprefix(prefix).split(".")[0]
            # A layer's own parameters stay together, under its name.
            found.setdefault(child if child in children else name, {})[each] = param
    return found


def _size(params: Mapping[str, torch.Tensor]) -> int:
    return sum(param.numel() for param in params.values())


def _described(names: Collection[str]) -> str:
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    return ", ".join(layers[:4]) + more
