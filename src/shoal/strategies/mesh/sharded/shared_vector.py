"""Vectors in memory that all workers of a row share: values exist once on the host, and nobody sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import torch
from torch import nn

from shoal.arena import Segment, segment_bytes
from shoal.comm.group import Group, sum_in_order
from shoal.layout.state_cuts import StateCut
from shoal.model.parking.parked import Values
from shoal.strategies.mesh.sharded.vector import Vector

_ALIGN_BYTES = 64
_PIECE_BYTES = 1 << 20
"""Sums are made in pieces that stay in a core's own cache."""


def row_regions(vector_bytes: Sequence[int], workers: int, level: int) -> dict[str, int]:
    """What the workers of a row share, by name: the parameters of all vectors once; and for each worker the
    gradients of all of them (level 1), or of two of the largest."""
    total = sum(map(_aligned, vector_bytes))
    gradients = total if level == 1 else 2 * _largest(vector_bytes)
    return {
        "parameters": max(total, _ALIGN_BYTES),
        **{_gradients_of(worker): max(gradients, _ALIGN_BYTES) for worker in range(workers)},
    }


def row_bytes(vector_bytes: Sequence[int], workers: int, level: int) -> int:
    """The bytes of all that on their host."""
    return segment_bytes(row_regions(vector_bytes, workers, level).values())


def _largest(vector_bytes: Sequence[int]) -> int:
    return max(map(_aligned, vector_bytes), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _gradients_of(worker: int) -> str:
    return f"gradients/{worker}"


class VectorRoom:
    """Where one vector lies, and the gradients that each worker finds for it: at one offset, or at two that all
    vectors use in turns."""

    def __init__(
        self,
        segment: Segment,
        look: tuple[torch.dtype, int],
        at: int,
        offsets: Sequence[int],
        which: Iterator[int],
    ) -> None:
        """`at`, `offsets`: where in their regions; `which`: gives the number of the next offset."""
        self._segment, self._offsets = segment, offsets
        self._dtype, self._numel = look
        self.which = which
        self.parameters = segment.tensor("parameters", self._dtype, offset=at, count=self._numel)

    def gradients(self, workers: int) -> list[list[torch.Tensor]]:
        """By offset and worker."""
        return [
            [
                self._segment.tensor(_gradients_of(worker), self._dtype, offset=at, count=self._numel)
                for worker in range(workers)
            ]
            for at in self._offsets
        ]


def share_rooms(looks: Sequence[tuple[torch.dtype, int]], axis: Group, level: int) -> Iterator[VectorRoom]:
    """Room for vectors of these dtypes and lengths."""
    sizes = [dtype.itemsize * numel for dtype, numel in looks]
    segment = axis.share(row_regions(sizes, axis.size, level))
    assert segment is not None, "asked of groups that share memory alone"
    start, which = 0, cycle((0, 1))
    for look, nbytes in zip(looks, sizes, strict=True):
        yield VectorRoom(segment, look, start, (start,) if level == 1 else (0, _largest(sizes)), which)
        start += _aligned(nbytes)


class SharedVector(Vector):
    """All in the row see what an owner writes, at once: owners write when all have told their gradients, and
    the next pass begins when all have written. So gathering and letting go are nothing."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], cut: StateCut, axis: Group, values: Values, room: VectorRoom
    ) -> None:
        super().__init__(params, cut, axis, values, room=room.parameters)
        self._mine = slice(cut.bounds[axis.index], cut.bounds[axis.index + 1])
        self._found = room.gradients(axis.size)
        self._which = room.which
        self._kept_sum: torch.Tensor | None = None

    def _enter(self, values: Values) -> None:
        for name, param in self._params.items():
            view = self._vector[self._ranges[name]].view(param.shape)
            if self._axis.is_first:  # all have the same
                view.copy_(values(param))
            param.data = view

    def gather(self) -> None:
        return

    def let_go(self) -> None:
        return

    def gradient_views(self) -> dict[str, torch.Tensor]:
        """Where this worker's gradients belong, by parameter."""
        own = self._found[0][self._axis.index]
        return {name: own[self._ranges[name]].view(param.shape) for name, param in self._params.items()}

    def reduce(self) -> set[str]:
        # All reduce vectors in one order. Who is past the barrier has read what was here the time before the last.
        found = self._found[next(self._which)]
        names = self._take_gradients(found[self._axis.index])
        self._axis.barrier()
        if self._own_sum is None:
            self._own_sum = self._sum(found, self._room_for_sum())
        else:
            self._own_sum.add_(self._sum(found, torch.empty_like(self._own)))
        return names

    def _room_for_sum(self) -> torch.Tensor:
        """Kept from step to step: new memory would have to be made ready by the system each time."""
        if self._kept_sum is None:
            self._kept_sum = torch.empty_like(self._own)
        return self._kept_sum

    def add_up(self) -> None:
        """Sum the gradients that all have left in their rooms; each worker's own part is its alone."""
        (found,) = self._found
        self._own_sum = self._sum(found, found[self._axis.index][self._mine])

    def _sum(self, found: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """This worker's part of the sum, in the order of workers, as everywhere else."""
        if self._axis.size == 2:  # the sum may take the place of one of two parts
            return sum_in_order([one[self._mine] for one in found], out)
        length = max(1, _PIECE_BYTES // out.element_size())
        total = torch.empty(min(length, out.numel()), dtype=out.dtype)
        for start in range(0, out.numel(), length):
            piece = slice(start, min(start + length, out.numel()))
            parts = [one[self._mine][piece] for one in found]
            # Through memory of its own: `out` may be one of the parts.
            out[piece] = sum_in_order(parts, total[: piece.stop - piece.start])
        return out
