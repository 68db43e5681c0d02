"""The grid of workers: along each axis, who is in line with this process, and how they talk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.spec.model_parallel import AXES
from shoal.strategies.backend import Backend
from shoal.strategies.base import Setting
from shoal.strategies.listening import only_meanwhile

if TYPE_CHECKING:
    from shoal.spec import Mesh


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The workers in line with this process along one axis, and collectives over them. Everybody in line makes
    the same calls in the same order; with one worker in line they do nothing."""

    name: str
    index: int
    """Of this process in its line."""
    ranks: tuple[int, ...]
    """Of all in line, by index."""
    group: Any = None
    on_block: Callable[[], None] | None = None
    """Called before this process waits for others."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place; the same bits everywhere."""
        if self.size > 1:
            self.wait()
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum, in place."""
        if self.size > 1:
            self.wait()
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, by index; all have one shape."""
        if self.size == 1:
            return [tensor]
        self.wait()
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def sum_scattered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Part i becomes, at worker i, the sum of all; parts are of one shape. What is sent is half an
        `all_reduce_`. Worker i adds up itself: on CPUs that is faster than gloo's own way."""
        if self.size == 1:
            return parts[0]
        self.wait()
        sent = torch.stack(list(parts))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.sum(0)

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Take the values of the one with this index."""
        if self.size > 1:
            self.wait()
            dist.broadcast(tensor, self.ranks[index], group=self.group)
        return tensor

    def fill_from_owners(self, slices: Sequence[torch.Tensor]) -> None:
        """Slice i is taken from worker i, wherever it has another value; slices may differ in size."""
        if self.size == 1:
            return
        self.wait()
        sent = [
            dist.broadcast(one, self.ranks[index], group=self.group, async_op=True)
            for index, one in enumerate(slices)
            if one.numel()
        ]
        for each in sent:
            each.wait()

    def reduce_to_owners(self, slices: Sequence[torch.Tensor]) -> None:
        """Slice i becomes, at worker i, the sum of all; elsewhere it is undefined."""
        if self.size == 1:
            return
        self.wait()
        sent = [
            dist.reduce(one, self.ranks[index], group=self.group, async_op=True)
            for index, one in enumerate(slices)
            if one.numel()
        ]
        for each in sent:
            each.wait()

    def wait(self) -> None:
        """Tell that this process is about to wait for others."""
        if self.on_block is not None:
            self.on_block()


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The whole grid as this process sees it."""

    data: Axis
    shard: Axis
    pipeline: Axis
    tensor: Axis
    lanes: Axis
    """Those with the same part of the model, over data and shard together: each has its own part of the batch."""
    world: Axis
    """All."""
    backend: Backend

    @classmethod
    def form(cls, mesh: Mesh, setting: Setting) -> Axes:
        """Meet the others, and draw the lines; everybody draws all of them, in one order."""
        backend = Backend(setting)
        rank, size = setting.world.global_rank, setting.world.world_size
        grid = torch.arange(size).view(mesh.sizes)
        block = setting.company.on_block

        def lines(names: Sequence[str]) -> Axis:
            dims = [AXES.index(name) for name in names]
            rest = [dim for dim in range(grid.dim()) if dim not in dims]
            rows = grid.permute(*rest, *dims).reshape(-1, _product(mesh.sizes[dim] for dim in dims))
            mine: Axis | None = None
            for row in rows.tolist():
                group = dist.new_group(row) if 1 < len(row) < size else None  # None: all
                if rank in row:
                    name = "+".join(names)
                    mine = Axis(name=name, index=row.index(rank), ranks=tuple(row), group=group, on_block=block)
            assert mine is not None
            return mine

        with only_meanwhile():
            drawn = {name: lines([name]) for name in AXES} | {"lanes": lines(["data", "shard"])}
        return cls(
            **drawn,
            world=Axis(name="world", index=rank, ranks=tuple(range(size)), on_block=block),
            backend=backend,
        )

    def close(self) -> None:
        """Leave the others."""
        self.backend.close()


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
