"""Buffers that move during training (BatchNorm's running statistics), kept the same for any number of workers.

Every slot starts from the committed values and leaves its own; the step commits their mean, weighted as the
loss is. Whole numbers (`num_batches_tracked`) are taken from the first slot that had samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from shoal.arena import SharedMemory, make_grid
from shoal.arena.tensors import flat_of
from shoal.errors import TaskError
from shoal.model.normalising import has_moving_statistics

LARGEST_MOVING = 4096
"""Elements. Larger buffers outside of normalisation layers are masks and tables, which do not move."""

Owner = tuple[nn.Module, str]
"""A module and the name it calls a buffer by."""


class MovingBuffers:
    """The replica's moving buffers as one private block, and its counterparts in the arena."""

    def __init__(self, module: nn.Module) -> None:
        self._owners: list[list[Owner]] = []
        self._views: list[torch.Tensor] = []
        self._resting = [
            (name, buffer, buffer._version)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not _may_move(owner, buffer)
        ]
        found = _moving(module)
        self.are_there = bool(found or self._resting)
        """Whether the model has any buffers that could change in a pass."""
        grid = make_grid([flat_of(b) for _, b in found])
        self.nbytes = grid.nbytes
        device = found[0][1].device if found else "cpu"
        self._own = torch.zeros(grid.nbytes, dtype=torch.uint8, device=device)
        self._spans: list[tuple[torch.dtype, int, int]] = []
        for (owners, buffer), offset in zip(found, grid.offsets, strict=True):
            span = (buffer.dtype, offset, buffer.numel())
            # In a storage of its own: a change of one must not look to autograd, or to what compiles, like all.
            view = _alias(_view(self._own, span).view(buffer.shape))
            view.copy_(buffer)
            for owner, name in owners:
                owner._buffers[name] = view
            self._owners.append(owners)
            self._views.append(view)
            self._spans.append(span)

    def bind(self, segment: SharedMemory, slots: int) -> None:
        """Find the blocks of a segment that was laid out for this many slots."""
        self._committed = segment.tensor("buffers", torch.uint8, count=self.nbytes)
        self._slots = [segment.tensor(f"buffers/{slot}", torch.uint8, count=self.nbytes) for slot in range(slots)]

    def left_by(self, slot: int) -> torch.Tensor:
        """The block that this slot's values are left in."""
        return self._slots[slot]

    def publish(self) -> None:
        """Make this process's values the committed ones."""
        self._committed.copy_(self._own)

    def load(self) -> None:
        """Start from the committed values."""
        if self.nbytes:
            self._own.copy_(self._committed)

    def check_resting(self) -> None:
        """A large buffer that does move would be another one in every worker."""
        for name, buffer, version in self._resting:
            if buffer._version != version:
                raise TaskError(
                    f"Task: the model's buffer {name!r} ({buffer.numel()} elements) changes during training, and "
                    f"Shoal keeps only those of normalisation layers and of at most {LARGEST_MOVING} elements in "
                    "step; make it a parameter, or smaller."
                )

    def store(self, slot: int) -> None:
        """Leave this slot's values."""
        own = self.gather()
        if self.nbytes:
            self._slots[slot].copy_(own)

    def _gather(self) -> None:
        for owners, view in zip(self._owners, self._views, strict=True):
            for owner, name in owners:
                current = owner._buffers[name]
                if current is not view and current is not None:  # the model's code put a new tensor in its place
                    view.copy_(current)
                    owner._buffers[name] = view

    def commit(self, weights: Any) -> None:
        """Merge what the slots left. Reads only slots' blocks, so doing it twice does no harm."""
        if not self.nbytes:
            return
        used = [slot for slot in range(len(self._slots)) if weights[slot] > 0]
        self.merge(self._committed, [(self._slots[slot], float(weights[slot])) for slot in used])

    def merge(self, committed: torch.Tensor, left: Sequence[tuple[torch.Tensor, float]]) -> None:
        """The weighted mean of blocks, in their order; whole numbers are the first block's.

        Blocks come in slot order, and each is weighted before it is added, here as at the servers: another order,
        or one division at the end, would round otherwise.
        """
        if not left:
            return
        total = sum(weight for _, weight in left)
        first, first_weight = left[0]
        for span in self._spans:
            target = _view(committed, span)
            if not span[0].is_floating_point:
                target.copy_(_view(first, span))
                continue
            mean = _view(first, span) * (first_weight / total)
            for block, weight in left[1:]:
                mean.add_(_view(block, span), alpha=weight / total)
            target.copy_(mean)

    @property
    def own(self) -> torch.Tensor:
        """This process's values, as bytes."""
        return self._own

    def gather(self) -> torch.Tensor:
        """This process's values after a pass, as bytes."""
        self.check_resting()
        self._gather()
        return self._own

    def keep(self) -> Callable[[], None]:
        """Note this process's values, in the middle of a pass; what is returned puts them back."""
        self._gather()
        kept = self._own.clone() if self.nbytes else self._own

        def put_back() -> None:
            self._gather()  # what the model's code put in their place meanwhile
            self._own.copy_(kept)

        return put_back

    def begin_mean(self) -> BufferMean:
        """Start a step of a worker that shares no memory with the others."""
        return BufferMean(self)


class BufferMean:
    """The weighted mean of what the slots leave, for workers that sum over sockets."""

    def __init__(self, buffers: MovingBuffers) -> None:
        self._buffers = buffers
        self._start = buffers._own.clone()
        self._floats = [view for view in buffers._views if view.is_floating_point()]
        self._others = [view for view in buffers._views if not view.is_floating_point()]
        device = buffers._own.device
        self._sum = torch.zeros(sum(view.numel() for view in self._floats), dtype=torch.float64, device=device)
        self._counts = self._bytes()
        self.counted = False
        """Whether whole numbers changed in this worker's first slot that had samples."""
        self._filled = False

    def _bytes(self) -> torch.Tensor:
        """Whole numbers as bytes, which a sum of float64 carries exactly."""
        parts = [view.reshape(-1).view(torch.uint8) for view in self._others]
        return torch.cat(parts).double() if parts else self._sum[:0]

    def start(self) -> None:
        """A slot begins from the committed values."""
        self._buffers._own.copy_(self._start)

    def add(self, weight: float) -> None:
        """A slot is done."""
        self._buffers.check_resting()
        self._buffers._gather()
        if self._floats:
            self._sum.add_(torch.cat([view.reshape(-1) for view in self._floats]), alpha=weight)
        if weight > 0 and not self._filled:
            before, self._counts, self._filled = self._counts, self._bytes(), True
            self.counted = not torch.equal(before, self._counts)

    def finish(
        self, allreduce_: Callable[[torch.Tensor], object], weight: float, *, counted: bool, speaks: bool
    ) -> None:
        """Make the mean over all slots the committed values.

        Where anybody `counted`, whole numbers become those of the one worker that `speaks`.
        """
        if self._floats:
            allreduce_(self._sum)
            means = (self._sum / weight).split([view.numel() for view in self._floats])
            for view, mean in zip(self._floats, means, strict=True):
                view.copy_(mean.view(view.shape))
        if counted:
            self._counts.mul_(float(speaks))
            allreduce_(self._counts)
            sizes = [view.numel() * view.element_size() for view in self._others]
            for view, value in zip(self._others, self._counts.to(torch.uint8).split(sizes), strict=True):
                view.copy_(value.view(view.dtype).view(view.shape))


def moving_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Those that training changes, each once, where they lie now."""
    return [buffer for _, buffer in _moving(module)]


def moving_bytes(module: nn.Module) -> int:
    """What a model's moving buffers take, one behind the other; they need have no values."""
    return make_grid([flat_of(buffer) for _, buffer in _moving(module)]).nbytes


def _may_move(owner: nn.Module, buffer: torch.Tensor) -> bool:
    return has_moving_statistics(owner) or buffer.numel() <= LARGEST_MOVING


def _moving(module: nn.Module) -> list[tuple[list[Owner], torch.Tensor]]:
    """Every moving buffer with all its names: modules may share one."""
    found: dict[int, tuple[list[Owner], torch.Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and _may_move(owner, buffer):
                found.setdefault(id(buffer), ([], buffer))[0].append((owner, name))
    return list(found.values())


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor, which knows nothing of the first."""
    return from_dlpack(to_dlpack(tensor)) if tensor.numel() else tensor.data


def _view(block: torch.Tensor, span: tuple[torch.dtype, int, int]) -> torch.Tensor:
    dtype, offset, count = span
    return block[offset : offset + count * dtype.itemsize].view(dtype)
