"""What workers that agree now and then talk through, and how much they agree on."""

from __future__ import annotations

from shoal.comm.group.regions import group_bytes
from shoal.model.blueprint import Blueprint
from shoal.spec import Average
from shoal.spec.model_size import CutSize
from shoal.strategies.average.values import AgreedValues


def cut_size(spec: Average, blueprint: Blueprint, workers: int) -> CutSize:
    """Every worker has the whole model; what all agree on are its values as long vectors."""
    talks = spec.via in ("auto", "memory") and not spec.shares_memory
    return CutSize(talk=group_bytes(workers) if talks else 0, agreed=AgreedValues(blueprint).num_bytes)
