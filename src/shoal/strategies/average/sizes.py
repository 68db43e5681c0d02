"""What workers that agree now and then talk through."""

from __future__ import annotations

from shoal.comm.group.regions import group_bytes
from shoal.model.blueprint import Blueprint
from shoal.spec import Average
from shoal.spec.model_size import CutSize


def cut_size(spec: Average, blueprint: Blueprint, workers: int) -> CutSize:
    """Every worker has the whole model; buffers of the host's memory are all that is laid out besides."""
    return CutSize(talk=group_bytes(workers) if spec.via in ("auto", "memory") else 0)
