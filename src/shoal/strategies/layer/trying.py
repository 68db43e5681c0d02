"""Whether workers can share a model's layers, found out by one process that trains nothing."""

from __future__ import annotations

from typing import Any

from shoal.model.replica import Replica
from shoal.spec import Layer
from shoal.strategies.layer.block_steps import find_steps, place_steps
from shoal.strategies.layer.decoupled import groups_for, looked_into
from shoal.strategies.layer.steps import follow


def try_cut(spec: Layer, replica: Replica, batch: Any, workers: int) -> None:
    """Raises what a run would say of this model."""
    module = replica.module
    if not spec.cuts_model:
        return
    if spec.decoupled:
        traced = {mode: follow(module, looked_into(module), training=mode) for mode in (True, False)}
        groups_for(traced[True], workers)
    else:
        place_steps(find_steps(replica, spec.homes)[True], spec.homes, workers, replica)
