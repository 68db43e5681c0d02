"""How a grid of workers cuts a model: the blocks that are gathered together, and what has no width to cut."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shoal.model.blueprint import Blueprint
from shoal.spec import ModelParallel, as_mesh
from shoal.spec.model_size import CutSize
from shoal.strategies.mesh.axes import mesh_group_bytes
from shoal.strategies.mesh.sharded.blocks import find_blocks


def cut_size(spec: ModelParallel, blueprint: Blueprint, workers: int) -> CutSize:
    """Of the whole model; where stages of a pipeline share it out first, nothing is said of blocks."""
    mesh = as_mesh(spec, workers)
    trained = {name: p for name, p in blueprint.trained.items() if isinstance(p, nn.Parameter)}
    units: tuple[int, ...] = ()
    if mesh.shard > 1 and mesh.pipeline == 1:
        blocks = find_blocks(blueprint.module, trained)
        units = tuple(sum(trained[name].nbytes for name in block.names) for block in blocks)
    return CutSize(
        units=units,
        uncut=_uncut(trained.values(), mesh.tensor),
        talk=0 if mesh.via == "backend" else mesh_group_bytes(mesh.sizes),
    )


def _uncut(params: Iterable[nn.Parameter], width: int) -> float:
    """The share of parameters that cannot be cut by width: none of their first two sides is a multiple of it.
    Which of the others are, the plan decides when it has seen the model run."""
    sizes = [(p.nbytes, any(side % width == 0 for side in p.shape[:2])) for p in params]
    return sum(size for size, can in sizes if not can) / max(1, sum(size for size, _ in sizes))
