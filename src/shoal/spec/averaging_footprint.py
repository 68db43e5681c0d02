"""The footprint of workers each of which trains a model of its own, and agrees with others now and then."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.spec.data_footprint import COUNTER_BYTES, SUMS_PER_SLOT
from shoal.spec.footprint import Flow, Footprint, Medium, MemoryRegion, Stay, aligned
from shoal.spec.model_size import SCALAR_BYTES, TABLES, CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import of_worker, talk_regions, whole_footprint

TOLD_BESIDE = 2
"""Of a step, behind its sums: whether anybody asks to stop, and to save."""
HEAD_WORDS = 4
"""Of what a worker leaves: the step, whether it was the last on request, how often all had agreed before, and
whether its optimizer's state is there."""
_HEADER_BYTES = 8192
_NAMED_BYTES = 256
"""Of a header, for each tensor in it."""


@dataclass(frozen=True, kw_only=True)
class ClientRooms:
    """What is kept of clients that are simulated."""

    controls: int = 0
    """So many clients' mean gradients."""
    versions: int = 0
    """So many of the models that were agreed on last."""


NO_CLIENTS = ClientRooms()


def averaged_footprint(
    model: ModelSize,
    run: RunSize,
    cut: CutSize,
    *,
    every: int,
    outer_kept: int,
    is_gossip: bool,
    is_ensemble: bool,
    has_groups: bool,
    in_memory: bool,
    rooms: ClientRooms = NO_CLIENTS,
) -> Footprint:
    """`every`: steps from one agreement to the next; `outer_kept`: numbers that the outer optimizer keeps for each
    element; `is_gossip`: only neighbours tell each other; `is_ensemble`: nobody does;
    `has_groups`: workers of a group are in lockstep; `in_memory`: through memory that outlives a worker;
    `rooms`: what is kept of clients."""
    size = model.parameters + model.moving
    regions = (
        *whole_footprint(model, run).worker,
        *(() if is_ensemble else (of_worker("what all agreed on last", size, Stay.TRAINING),)),
        of_worker("the outer optimizer's state", outer_kept * model.parameters, Stay.TRAINING),
        *(_others_of_process(model, run) if in_memory else ()),
        *(
            (of_worker("how a client's steps are corrected", 3 * model.parameters, Stay.TRAINING),)
            * (rooms.controls > 0)
        ),
    )
    sent = 2 * size if is_gossip else 2 * (run.workers - 1) * size // run.workers
    if in_memory:
        sent = cut.agreed + state_image_bytes(model, run) + (2 if is_gossip else run.workers) * cut.agreed
    words = "neighbours" if is_gossip else "all workers"
    flow = Flow(
        what=f"parameters, agreed on by {words} every {every} steps",
        medium=Medium.MEMORY if cut.talk or in_memory else Medium.NETWORK,
        num_bytes=sent // every,
    )
    inside = Flow(
        what="gradients, summed up inside each group in every step",
        medium=Medium.MEMORY,
        num_bytes=2 * model.parameters,
    )
    flows = (flow,) * (not is_ensemble) + (inside,) * has_groups
    return Footprint(
        shared=arena_average_regions(model, run, cut, every=every, outer_kept=outer_kept, rooms=rooms)
        if in_memory
        else talk_regions(cut),
        worker=regions,
        workers=run.workers,
        flows=flows if run.workers > 1 else (),
    )


def _others_of_process(model: ModelSize, run: RunSize) -> tuple[MemoryRegion, ...]:
    """What a worker's places have while another one of them takes its step."""
    values, states = run.hosted * (model.parameters + model.moving), (run.hosted - 1) * model.state
    return (of_worker("what each of a worker's places has", values + states, Stay.TRAINING),) * (run.hosted > 1)


def arena_average_regions(
    model: ModelSize, run: RunSize, cut: CutSize, *, every: int, outer_kept: int, rooms: ClientRooms = NO_CLIENTS
) -> tuple[MemoryRegion, ...]:
    """All of the segment: what every worker has left when all met last, and the time before, and what is
    kept of clients."""
    places, steps = range(run.workers), run.steps + 1
    head = 8 * (HEAD_WORDS + run.workers)
    tables = {
        "counters": COUNTER_BYTES * num_marks(run.workers),
        "words": 8 * run.workers * num_rows(every) * word_columns(run.workers, run.slots),
        "losses": 8 * steps,
        "counts": 4 * run.slots * steps,
        "table": run.table,
        **{f"head/{place}/{half}": head for place in places for half in (0, 1)},
    }
    left = {f"values/{place}/{half}": cut.agreed for place in places for half in (0, 1)}
    left |= {f"numbers/{place}/{half}": model.moving for place in places for half in (0, 1)}
    left |= {f"state/{place}/{half}": state_image_bytes(model, run) for place in places for half in (0, 1)}
    agreed = {f"agreed/{half}": cut.agreed for half in (0, 1)}
    outer = {f"outer/{half}": outer_kept * cut.agreed + (outer_kept > 0) * _HEADER_BYTES for half in (0, 1)}
    return (
        *(MemoryRegion(name=name, what=TABLES, num_bytes=size) for name, size in tables.items()),
        *(
            MemoryRegion(name=name, what="what each worker has left for who follows it", num_bytes=size)
            for name, size in left.items()
        ),
        *(
            MemoryRegion(name=name, what="what all agreed on, for who follows", num_bytes=size)
            for name, size in (agreed | outer).items()
        ),
        *_client_regions(cut, rooms),
    )


def _client_regions(cut: CutSize, rooms: ClientRooms) -> tuple[MemoryRegion, ...]:
    """Of each client's mean gradients two, with the rounds that they are of; what was agreed on, by its number."""
    of_each = "the mean gradients that each client saw when it trained last, and the time before"
    before = "what was agreed on before, from which clients that are under way have begun"
    regions = (
        MemoryRegion(name="controls", what=of_each, num_bytes=2 * rooms.controls * cut.agreed),
        MemoryRegion(name="control rounds", what=TABLES, num_bytes=2 * rooms.controls * 8),
        MemoryRegion(name="versions", what=before, num_bytes=rooms.versions * cut.agreed),
        MemoryRegion(name="version numbers", what=TABLES, num_bytes=rooms.versions * 8),
    )
    return tuple(region for region in regions if region.num_bytes)


def num_marks(places: int) -> int:
    """Counters: two for all, three for each place."""
    return 2 + 3 * places


def num_rows(every: int) -> int:
    """Steps whose words stay: nobody is further ahead of anybody than the end of the next round."""
    return 2 * every + 2


def word_columns(workers: int, slots: int) -> int:
    """What a worker tells of a step: its sums, wishes, what it counts, and the samples of its slots."""
    return SUMS_PER_SLOT + TOLD_BESIDE + workers + slots


def state_image_bytes(model: ModelSize, run: RunSize) -> int:
    """Room for what one worker's optimizer keeps, with a header that says what it is."""
    if model.whole_state is not None:
        return run.image
    tensors = len(model.trained) * (model.kept + model.scalars)
    values = sum(model.kept * aligned(size) for size in model.trained)
    scalars = len(model.trained) * model.scalars * aligned(SCALAR_BYTES)
    return _HEADER_BYTES + _NAMED_BYTES * tensors + values + scalars
