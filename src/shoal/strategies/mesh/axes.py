"""The grid of workers: along each axis, who is in a row with this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.comm.group import Group, group_bytes
from shoal.comm.group.base import Rows
from shoal.spec.model_parallel import AXES
from shoal.strategies.base import Setting
from shoal.strategies.groups.opening import open_group

if TYPE_CHECKING:
    from shoal.spec import Mesh

LANE_AXES = ("data", "shard")
"""The axes along which workers have parts of the batch."""


@dataclass(frozen=True, kw_only=True)
class GridCrew:
    """Who forms a grid, where it is one of several that train models of their own. Whoever names them closes
    them."""

    everybody: Group
    """The workers of this one."""
    alike: Group
    """Those of all of them: they begin from one model, and cut it in the same way."""
    grids: Rows
    """By grid: its ranks. Rows of all grids are formed by all together."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The whole grid as this process sees it: along each axis, those in a row with it."""

    data: Group
    shard: Group
    pipeline: Group
    tensor: Group
    across_lanes: Group
    """Those with the same part of the model, over data and shard together: each has its own part of the batch."""
    everybody: Group
    """All of the grid."""
    alike: Group
    """All whose models are cut as this one is: those of the grid, or of several grids."""

    @classmethod
    def form(cls, mesh: Mesh, setting: Setting, crew: GridCrew | None = None) -> Axes:
        """Meet the others, and form the rows; everybody forms all of them, in one order."""
        if crew is None:
            everybody = open_group(mesh.via, setting)
            crew = GridCrew(everybody=everybody, alike=everybody, grids=[everybody.ranks])
        alike, grids = crew.alike, crew.grids

        def row(names: Sequence[str]) -> Group:
            rows = rows_along(names, mesh.sizes)
            return alike.split([[grid[index] for index in one] for grid in grids for one in rows])

        along = {name: row((name,)) for name in AXES}
        return cls(**along, across_lanes=row(LANE_AXES), everybody=crew.everybody, alike=alike)


def rows_along(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The indices of every row along these axes of a grid whose axes are so long."""
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    rows: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        point = [rank // stride % size for stride, size in zip(strides, sizes, strict=True)]
        others = tuple(at for axis, at in zip(AXES, point, strict=True) if axis not in names)
        rows.setdefault(others, []).append(rank)
    return [tuple(row) for row in rows.values()]


def mesh_group_bytes(sizes: Sequence[int]) -> int:
    """The bytes that the groups of a grid whose axes are so long take on its host; equal rows count once."""
    grids = {tuple(rows_along(names, sizes)) for names in (AXES, *((axis,) for axis in AXES), LANE_AXES)}
    return sum(group_bytes(len(row)) for rows in grids for row in rows)
