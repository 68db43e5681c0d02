"""How strategies that cut the state of a model cut it: the blocks that are gathered together."""

from __future__ import annotations

from torch import nn

from shoal.spec import ModelParallel, as_mesh
from shoal.spec.model_size import CutSize
from shoal.strategies.mesh.sharded.blocks import find_blocks
from shoal.strategies.model_size import Blueprint


def cut_size(spec: ModelParallel, blueprint: Blueprint, workers: int) -> CutSize:
    """Of the whole model; where stages of a pipeline share it out first, nothing is said."""
    mesh = as_mesh(spec, workers)
    if mesh.shard == 1 or mesh.pipeline > 1:
        return CutSize()
    trained = {name: p for name, p in blueprint.trained.items() if isinstance(p, nn.Parameter)}
    blocks = find_blocks(blueprint.module, trained)
    return CutSize(units=tuple(sum(trained[name].nbytes for name in block.names) for block in blocks))
