"""How the workers of one lane compute together: the whole model in each of them, or a pipeline of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shoal.model.recompute import compute_once, recompute_blocks
from shoal.model.replica import Replica, call_model
from shoal.spec import Mesh
from shoal.step.compute import Backward, Sums, backward_part
from shoal.step.work import Work
from shoal.strategies.base import Setting
from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.splits import Split


@dataclass(frozen=True, kw_only=True)
class LaneSums:
    """What a lane's parts of a step came to."""

    sums: Sums
    """Of all its parts; the loss is known to whoever `speaks`, the rest to all."""
    samples: Mapping[int, int]
    """By slot."""
    speaks: bool
    """Whether this process tells it to the other lanes."""


class Line(Protocol):
    """A lane as one of its processes sees it."""

    module: nn.Module
    """What this process has of the model."""
    names: Mapping[str, str]
    """By name in `module`'s state, the name in the task's model; of tied parameters that of `named_parameters`."""
    stages: Mapping[str, tuple[int, ...]]
    """By name in the task's model, of all its parameters and buffers: the workers of the pipeline axis that have
    it, in order."""
    splits: Mapping[str, Split]
    """By name in the task's model: how the tensor axis cuts what it cuts."""

    def backward(self, work: Work, run: Backward) -> LaneSums:
        """Leave the gradients of this lane's parts in `p.grad`; `run` is how a pass of the whole model runs."""

    def infer(self, inputs: Any) -> Any:
        """The model's output, without gradients; None where another process of the lane has it."""


def make_line(replica: Replica, mesh: Mesh, axes: Axes, setting: Setting) -> Line:
    """Cut the replica's model by depth and width, as the mesh says."""
    if mesh.pipeline > 1:
        from shoal.strategies.mesh.pipeline.line import PipelineLine

        return PipelineLine(replica, mesh, axes, setting)
    return WholeLine(replica, mesh, axes, setting)


class WholeLine:
    """Each process runs all layers, each of them as wide as the tensor axis leaves it."""

    def __init__(self, replica: Replica, mesh: Mesh, axes: Axes, setting: Setting) -> None:
        self._replica = replica
        self._speaks = axes.tensor.is_first
        module = replica.module
        canonical = {id(p): name for name, p in module.named_parameters()}
        state = module.state_dict(keep_vars=True)
        self.names: Mapping[str, str] = {name: canonical.get(id(tensor), name) for name, tensor in state.items()}
        self.stages: Mapping[str, tuple[int, ...]] = dict.fromkeys(self.names.values(), (0,))
        self.splits: Mapping[str, Split] = {}
        if mesh.tensor > 1:
            from shoal.strategies.mesh.tensor.cutting import cut_width

            if replica.recomputes:
                compute_once(module)
            self.splits = cut_width(module, mesh, axes.tensor, replica, setting)
            if replica.recomputes:
                recompute_blocks(module)
        self.module = module

    def backward(self, work: Work, run: Backward) -> LaneSums:
        by_slot = {part.slot: backward_part(self._replica, work, part, run) for part in work.parts}
        return LaneSums(
            sums=sum(by_slot.values(), start=Sums()),
            samples={slot: int(own.samples) for slot, own in by_slot.items()},
            speaks=self._speaks,
        )

    def infer(self, inputs: Any) -> Any:
        return call_model(self.module, inputs)
