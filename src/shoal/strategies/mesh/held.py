"""What a worker holds of the model: parts of parameters, and how the whole ones come out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.wires import receive, send


@dataclass(frozen=True)
class Span:
    """Elements of a flattened parameter (or of this worker's width of it): those that one worker of the shard axis
    keeps and updates."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter, or the part of it, that the optimizer of this process updates."""

    name: str
    """Of the whole parameter, as in the task's model."""
    tensor: torch.Tensor
    """Its values here; `tensor.grad` is set before the optimizer's step."""
    shape: torch.Size
    """Of this worker's width of it, before the shard axis cuts it."""
    split: Split | None = None
    """How the tensor axis cuts it; None: all in line have the same."""
    spans: tuple[Span, ...] = ()
    """By worker of the shard axis: the elements that each has; none: all have all."""
    stages: tuple[int, ...] = (0,)
    """Workers of the pipeline axis that have it: several where stages share it."""

    def counts(self, axes: Axes) -> bool:
        """Whether this process is the one that counts it in a sum over all parameters."""
        first_of_lane = axes.data.is_first and (bool(self.spans) or axes.shard.is_first)
        first_of_width = self.split is not None or axes.tensor.is_first
        return first_of_lane and first_of_width and axes.pipeline.index == self.stages[0]


Combine = Callable[[Held], torch.Tensor | None]
"""Makes something whole out of the parts of all workers in line along shard and tensor, who all call it."""


def whole(held: Held, value: torch.Tensor, axes: Axes) -> torch.Tensor:
    """A parameter, or what is shaped as one, from the parts of it; `value` is this process's."""
    if held.spans:
        flat = torch.empty(held.shape.numel(), dtype=value.dtype, device=value.device)
        slices = [flat[span.start : span.stop] for span in held.spans]
        slices[axes.shard.index].copy_(value.reshape(-1))
        axes.shard.fill_from_owners(slices)
        value = flat.view(held.shape)
    return value if held.split is None else held.split.join(axes.tensor.all_gather(value))


def single(held: Held, value: torch.Tensor | None, dtype: torch.dtype, axes: Axes) -> torch.Tensor | None:
    """A number that goes with a parameter, from whoever has any of it."""
    if not held.spans:
        return value
    owner = next(index for index, span in enumerate(held.spans) if span.stop > span.start)
    number = torch.zeros((), dtype=dtype) if value is None else value.clone()
    return axes.shard.broadcast_(number, owner)


def gather(
    wanted: Mapping[str, int], held: Mapping[str, Held], axes: Axes, combine: Combine
) -> Iterator[tuple[str, torch.Tensor]]:
    """One whole tensor after the other, at the first worker alone; all workers call this and consume all of it.

    `wanted`: by name, the worker of the pipeline axis that has it. Nobody ever has more than one whole tensor.
    """
    for name, stage in wanted.items():
        found = combine(held[name]) if axes.pipeline.index == stage else None
        if stage and axes.lanes.is_first and axes.tensor.is_first:
            if axes.pipeline.index == stage:
                send(found, 0, axes.pipeline)
            elif axes.pipeline.is_first:
                found = receive(stage, axes.pipeline)
        if axes.world.is_first and found is not None:
            yield name, found.detach()
