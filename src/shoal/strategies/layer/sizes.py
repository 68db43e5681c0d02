"""How `layer` cuts a model: which worker has how much of it."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.comm.group.regions import group_bytes
from shoal.model.blueprint import Blueprint
from shoal.spec import Layer
from shoal.spec.model_size import CutSize
from shoal.strategies.cut.tracing import state_used
from shoal.strategies.layer.decoupled import looked_into
from shoal.strategies.layer.graph import groups_by_depth
from shoal.strategies.layer.placement import assign, spread
from shoal.strategies.layer.steps import Traced, follow


def cut_size(spec: Layer, blueprint: Blueprint, workers: int) -> CutSize:
    """By worker, the parameters that its layers use; one that several use counts at each."""
    if not spec.cuts_model:
        return CutSize()
    module = blueprint.module
    traced = follow(module, looked_into(module) if spec.decoupled else spec.homes)
    homes = _homes(spec, traced, workers)
    trained = {id(p): p.nbytes for p in blueprint.trained.values()}
    users: dict[int, set[int]] = {key: set() for key in trained}
    for name, step in traced.steps.items():
        for tensor in state_used(module, step):
            if id(tensor) in users:
                users[id(tensor)].add(homes[name])
    parts = [0] * workers
    for key, num_bytes in trained.items():
        for worker in users[key] or {0}:
            parts[worker] += num_bytes
    return CutSize(parts=tuple(parts), talk=group_bytes(workers) if spec.via in ("auto", "memory") else 0)


def _homes(spec: Layer, traced: Traced, workers: int) -> Mapping[str, int]:
    """By step: its worker, as `LayerLine` finds it."""
    if spec.decoupled:
        groups = groups_by_depth(traced.nodes, workers)
        return {node.name: rank for rank, group in enumerate(groups) for node in group}
    return assign(traced.nodes, spec.homes or spread(traced.nodes, workers))
