"""Whether a grid of workers can cut a model, found out by one process that trains nothing."""

from __future__ import annotations

from typing import Any

from shoal.layout.stage_split import split_chain
from shoal.model.replica import Replica
from shoal.spec import ModelParallel, as_mesh
from shoal.step.objective import inputs_of


def try_cut(spec: ModelParallel, replica: Replica, batch: Any, workers: int) -> None:
    """Raises what a pipeline would say of this model; where the stages fall is measured when it trains."""
    mesh = as_mesh(spec, workers)
    if mesh.pipeline == 1:
        return
    from shoal.strategies.mesh.pipeline.block_chain import find_links
    from shoal.strategies.mesh.pipeline.chain import parse_split

    chain = find_links(replica.module, inputs_of(replica.task, batch), opens_layers=mesh.tensor == 1)
    if mesh.split != "auto":
        counts = parse_split(chain, mesh.split, mesh.num_stages)
    else:
        counts = split_chain([1.0] * len(chain.links), mesh.num_stages) or ()
    chain.stages(counts)
