"""How `data` cuts a model in shared memory, and what else of a job decides how much is laid out there."""

from __future__ import annotations

from shoal.comm.group.regions import group_bytes
from shoal.model.blueprint import Blueprint
from shoal.model.precision import Precision
from shoal.spec import Data
from shoal.spec.model_size import CutSize, RunSize
from shoal.strategies.base import Extent
from shoal.strategies.data.shared import arena_grid, cut_of_grid
from shoal.strategies.data.shared_precision import bytes_of
from shoal.strategies.data.whole_journal import image_bytes


def cut_size(spec: Data, blueprint: Blueprint, workers: int) -> CutSize:
    """The arena's chunks, which depend on the model alone; where workers take turns, what they talk through."""
    if spec.partition == "relay":
        return CutSize(talk=group_bytes(workers))
    return cut_of_grid(arena_grid(list(blueprint.trained.values()), blueprint.task.clip_norm))


def size_of_run(blueprint: Blueprint, precision: Precision, extent: Extent, slots: int, workers: int) -> RunSize:
    """What a run of this extent lays out besides the model."""
    return RunSize(
        workers=workers,
        slots=slots,
        steps=extent.total_steps,
        table=8 * extent.tables * extent.table_rows * extent.table_columns,
        image=image_bytes(blueprint.optimizer),
        precision=bytes_of(precision, slots),
    )
