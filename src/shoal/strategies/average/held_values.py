"""What one worker of a team has of the team's model, and its part of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal.checkpoint.model_stream import TensorLooks
from shoal.model.buffers import moving_buffers
from shoal.strategies.average.outer import OuterStep, kind_name
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.groups.plain import share_plain
from shoal.strategies.groups.vectors import Vectors
from shoal.strategies.mesh.held import Held, Wanted, in_span, in_width
from shoal.strategies.mesh.strategy import MeshStrategy


@dataclass(frozen=True)
class _HeldParts:
    trained: Mapping[str, torch.Tensor]
    module: nn.Module


def moving_floats(module: nn.Module) -> list[str]:
    """The buffers that have a mean, and a name in the model's state."""
    moving = {id(buffer) for buffer in moving_buffers(module) if buffer.is_floating_point()}
    return [name for name, one in module.state_dict(keep_vars=True).items() if id(one) in moving]


class HeldValues(AgreedValues):
    """Parts of parameters, and the buffers of this worker's layers. What is written is there for all of the team,
    who write together."""

    def __init__(self, team: MeshStrategy, module: nn.Module, buffers: list[str]) -> None:
        """`module`: what this worker runs; `buffers`: of the whole model, those that have a mean."""
        self._team, self._buffers = team, buffers
        self._name_of = {id(held.tensor): name for name, held in team.fixed.items()}
        self._names: list[str] = []
        """By buffer, in the order in which they are found."""
        trained = {name: held.tensor for name, held in team.held.items() if _is_here(held)}
        self._module = module
        self._names = list(self.floats())
        super().__init__(_HeldParts(trained, module))

    def floats(self) -> dict[str, torch.Tensor]:
        found = [each for each in moving_buffers(self._module) if each.is_floating_point()]
        names = self._names or [self._name_of.get(id(one), f"buffer {n}") for n, one in enumerate(found)]
        return dict(zip(names, found, strict=True))

    def write(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> None:
        super().write(vectors)
        self._team.refresh()

    def norm(self, params: Vectors) -> float:
        """Of the whole team's, of which this worker has these; what several have counts once. All call this."""
        total = torch.zeros(1, dtype=torch.float64)
        for span in self.params:
            if self._team.held[span.name].counts(self._team.axes):
                total += span.of(params).double().square().sum().cpu()
        self._team.axes.everybody.all_reduce_(total)
        return float(total.sqrt())

    # Whole tensors.

    def wanted(self, prefix: str, vectors: Vectors) -> dict[str, Wanted]:
        """The whole tensors that vectors of all workers of the team are parts of."""
        spans = {span.name: span for span in (*self.params, *self.buffers)}
        found = {}
        for name in (*self._team.trained_names, *self._buffers):
            whole = self._team.looks(name)
            looks = TensorLooks(dtype=_kind(whole), shape=whole.shape)
            value = spans[name].of(vectors) if name in spans else None
            found[prefix + name] = self._team.want(prefix + name, name, value, looks)
        return found

    def vectors_of(self, whole: Mapping[str, torch.Tensor]) -> Vectors:
        """This worker's part of whole tensors, by name; of what is not there, what it has."""
        found = self.read()
        for span in (*self.params, *self.buffers):
            if span.name in whole:
                span.of(found).copy_(self._part(span.name, whole[span.name]))
        return found

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        held = self._team.held.get(name) or self._team.fixed[name]
        return in_span(held, in_width(held, whole, self._team.axes), self._team.axes)

    def wanted_outer(self, prefix: str, outer: OuterStep) -> dict[str, Wanted]:
        """What an outer optimizer keeps for each parameter, whole, by `parameter/key`. All call this."""
        own = outer.state()
        looks = {path: [str(one.dtype).removeprefix("torch."), bool(one.dim())] for path, one in own.items()}
        told = {
            path: look for each in share_plain(looks, self._team.axes.everybody) for path, look in each.items()
        }
        spans = {span.name: span for span in self.params}
        found = {}
        for name in self._team.trained_names:
            whole = self._team.looks(name)
            for path, (dtype, is_cut) in sorted(told.items()):
                kind, _, key = path.partition("/")
                if kind != kind_name(_kind(whole)):
                    continue
                value = own.get(path) if name in spans else None
                if value is not None and is_cut:
                    value = spans[name].of({_kind(whole): value})
                shape = whole.shape if is_cut else ()
                its = TensorLooks(dtype=getattr(torch, dtype), shape=shape)
                at = f"{prefix}{name}/{key}"
                found[at] = self._team.want(at, name, value, its, is_cut=is_cut)
        return found

    def outer_of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This worker's part of that, as an outer optimizer takes it up."""
        found: dict[str, torch.Tensor] = {}
        for span in self.params:
            prefix = f"{span.name}/"
            keys = {path.removeprefix(prefix): one for path, one in whole.items() if path.startswith(prefix)}
            for key, one in keys.items():
                at = f"{kind_name(span.kind)}/{key}"
                if key == "step":
                    found[at] = one.clone()
                    continue
                room = found.setdefault(at, torch.zeros(self.num_params[span.kind], dtype=span.kind))
                span.of({span.kind: room}).copy_(self._part(span.name, one))
        return found


def _is_here(held: Held) -> bool:
    return held.tensor.numel() > 0 or not held.spans


def _kind(looks: TensorLooks) -> torch.dtype:
    return torch.promote_types(looks.dtype, torch.float32)
