"""How strategies that cut the state of a model cut it: the blocks that are gathered together."""

from __future__ import annotations

from torch import nn

from shoal.comm.group.regions import group_bytes
from shoal.spec import Mesh, ModelParallel, as_mesh
from shoal.spec.model_parallel import AXES
from shoal.spec.model_size import CutSize
from shoal.strategies.mesh.sharded.blocks import find_blocks
from shoal.strategies.model_size import Blueprint


def cut_size(spec: ModelParallel, blueprint: Blueprint, workers: int) -> CutSize:
    """Of the whole model; where stages of a pipeline share it out first, nothing is said."""
    mesh = as_mesh(spec, workers)
    talk = 0 if mesh.via == "backend" else talk_bytes(mesh)
    if mesh.shard == 1 or mesh.pipeline > 1:
        return CutSize(talk=talk)
    trained = {name: p for name, p in blueprint.trained.items() if isinstance(p, nn.Parameter)}
    blocks = find_blocks(blueprint.module, trained)
    units = tuple(sum(trained[name].nbytes for name in block.names) for block in blocks)
    return CutSize(units=units, talk=talk)


def talk_bytes(mesh: Mesh) -> int:
    """What the groups of a mesh take on their host: all workers, and those in line along each axis."""
    everybody = mesh.num_workers
    widths = [mesh.sizes[AXES.index(name)] for name in AXES] + [mesh.data * mesh.shard]
    lines = sum(everybody // width * group_bytes(width) for width in set(widths) if 1 < width < everybody)
    return group_bytes(everybody) + lines
