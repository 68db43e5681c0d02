"""What a worker holds of the model: parts of parameters, and how the whole ones come out of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from shoal.checkpoint.model_stream import TensorLooks
from shoal.comm.group import Group
from shoal.strategies.cut.wires import receive_values, send_values
from shoal.strategies.mesh.axes import Axes
from shoal.strategies.mesh.splits import Split


@dataclass(frozen=True)
class HeldSpan:
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
    """How the tensor axis cuts it; None: all in the row have the same."""
    spans: tuple[HeldSpan, ...] = ()
    """By worker of the shard axis: the elements that each has; none: all have all."""
    stages: tuple[int, ...] = (0,)
    """Workers of the pipeline axis that have it: several where stages share it."""

    def counts(self, axes: Axes) -> bool:
        """Whether this process is the one that counts it in a sum over all parameters."""
        first_of_lane = axes.data.is_first and (bool(self.spans) or axes.shard.is_first)
        first_of_width = self.split is not None or axes.tensor.is_first
        return first_of_lane and first_of_width and axes.pipeline.index == self.stages[0]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A tensor that is to come whole to the first worker: a parameter, a buffer, or what goes with a parameter."""

    name: str
    looks: TensorLooks
    """Of the whole."""
    stage: int
    """The worker of the pipeline axis that gives it."""
    held: Held | None
    """The parameter or buffer; None in other stages."""
    value: torch.Tensor | None
    """This process's part of it; None where it has nothing of it."""
    is_cut: bool = True
    """Whether it is cut as the parameter is; else it is one number, or whatever, that each part has."""


def in_width(one: Held, whole: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Of a whole tensor what belongs to this worker's width of a parameter."""
    if one.split is None or whole.dim() != len(one.shape):
        return whole
    return one.split.cut(whole, axes.tensor.index, axes.tensor.size)


def in_span(one: Held, wide: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Of this worker's width of a tensor the elements that it keeps."""
    span = one.spans[axes.shard.index] if one.spans else HeldSpan(0, wide.numel())
    return wide.reshape(-1)[span.start : span.stop].reshape(one.tensor.shape)


def gather(wanted: Iterable[Wanted], axes: Axes) -> Iterator[tuple[str, torch.Tensor]]:
    """One whole tensor after the other, in the host's memory, at the first worker alone; all workers call this and
    consume all of it. Parts go straight there: others send theirs, and nobody has more than one whole tensor."""
    for one in wanted:
        found = None
        if axes.data.is_first and axes.pipeline.index == one.stage:
            assert one.held is not None
            found = _over_width(one, one.held, _over_spans(one, one.held, axes.shard), axes.tensor)
        if one.stage and axes.across_lanes.is_first and axes.tensor.is_first:
            if found is not None:
                send_values(found, 0, axes.pipeline)
            elif axes.pipeline.is_first:
                found = one.looks.room()
                receive_values(found, one.stage, axes.pipeline)
        if axes.everybody.is_first:
            assert found is not None
            yield one.name, found.detach()


def _over_spans(one: Wanted, held: Held, axis: Group) -> torch.Tensor | None:
    """This worker's width of it, at the first of the shard axis."""
    if not held.spans:
        return one.value if axis.is_first else None
    owners = [index for index, span in enumerate(held.spans) if span.stop > span.start]
    if not one.is_cut:
        del owners[1:]  # each has the same
    if not axis.is_first:
        if axis.index in owners:
            assert one.value is not None
            send_values(one.value, 0, axis)
        return None
    found = torch.empty(held.shape, dtype=one.looks.dtype) if one.is_cut else one.looks.room()
    for owner in owners:
        span = held.spans[owner] if one.is_cut else HeldSpan(0, found.numel())
        room = found.view(-1)[span.start : span.stop]
        if owner:
            receive_values(room, owner, axis)
        else:
            assert one.value is not None
            room.copy_(one.value.reshape(-1))
    return found


def _over_width(one: Wanted, held: Held, value: torch.Tensor | None, axis: Group) -> torch.Tensor | None:
    """All of its width, at the first of the tensor axis; `value` is this worker's."""
    if held.split is None or not one.is_cut or value is None:
        return value if axis.is_first else None
    if not axis.is_first:
        send_values(value, 0, axis)
        return None
    found = one.looks.room()
    part = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    for index in range(axis.size):
        if index:
            receive_values(part, index, axis)
        held.split.fill(found, index, axis.size, part)
    return found
