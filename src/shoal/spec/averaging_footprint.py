"""The footprint of workers each of which trains a model of its own, and agrees with others now and then."""

from __future__ import annotations

from shoal.spec.footprint import Flow, Footprint, Medium, Stay
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import of_worker, talk_regions, whole_footprint


def averaged_footprint(
    model: ModelSize, run: RunSize, cut: CutSize, *, every: int, outer_kept: int, is_gossip: bool
) -> Footprint:
    """`every`: steps from one agreement to the next; `outer_kept`: numbers that the outer optimizer keeps for each
    element; `is_gossip`: only neighbours tell each other."""
    size = model.parameters + model.moving
    regions = (
        *whole_footprint(model, run).worker,
        of_worker("what all agreed on last", size, Stay.TRAINING),
        of_worker("the outer optimizer's state", outer_kept * model.parameters, Stay.TRAINING),
    )
    sent = 2 * size if is_gossip else 2 * (run.workers - 1) * size // run.workers
    words = "neighbours" if is_gossip else "all workers"
    flow = Flow(
        what=f"parameters, agreed on by {words} every {every} steps",
        medium=Medium.MEMORY if cut.talk else Medium.NETWORK,
        num_bytes=sent // every,
    )
    return Footprint(
        shared=talk_regions(cut),
        worker=regions,
        workers=run.workers,
        flows=(flow,) if run.workers > 1 else (),
    )
