"""Lines of a grid, and what their groups take."""

from __future__ import annotations

from shoal.comm.group import group_bytes
from shoal.spec.model_parallel import AXES
from shoal.strategies.mesh.axes import mesh_group_bytes, rows_along

SIZES = (2, 1, 2, 2)
"""data, shard, pipeline, tensor"""


def test_lines_along_each_axis() -> None:
    assert rows_along(("tensor",), SIZES) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert rows_along(("pipeline",), SIZES) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert rows_along(("data",), SIZES) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rows_along(("shard",), SIZES) == [(rank,) for rank in range(8)]
    assert rows_along(("data", "shard"), SIZES) == rows_along(("data",), SIZES)
    assert rows_along(AXES, SIZES) == [tuple(range(8))]


def test_ranks_count_along_the_last_axis_first() -> None:
    assert rows_along(("data", "shard"), (2, 2, 1, 2)) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_equal_lines_are_one_group() -> None:
    assert mesh_group_bytes((1, 1, 1, 1)) == 0
    assert mesh_group_bytes((1, 4, 1, 1)) == group_bytes(4)
    assert mesh_group_bytes((2, 2, 1, 1)) == group_bytes(4) + 4 * group_bytes(2)
    assert mesh_group_bytes(SIZES) == group_bytes(8) + 12 * group_bytes(2)
