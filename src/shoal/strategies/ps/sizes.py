"""How `ps` cuts a model: the blocks of its shards."""

from __future__ import annotations

from shoal.model.blueprint import Blueprint
from shoal.spec import ParameterServer
from shoal.spec.model_size import CutSize
from shoal.step.clipping import cut_bytes
from shoal.strategies.ps.blocks import cut_of_blocks, lay_out
from shoal.strategies.ps.served import place_model


def cut_size(spec: ParameterServer, blueprint: Blueprint, workers: int) -> CutSize:
    """As every process of the job cuts it."""
    params, cut = list(blueprint.trained.values()), cut_bytes(blueprint.task.clip_norm)
    _, blocks = lay_out(place_model(spec, blueprint), params, cut)
    return cut_of_blocks(blocks)
