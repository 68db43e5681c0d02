"""What `data` lays out where the workers of a host share memory: the arena's regions, in their order."""

from __future__ import annotations

from shoal.spec.footprint import Flow, Footprint, Medium, MemoryRegion, Stay, aligned
from shoal.spec.model_size import SCALAR_BYTES, TABLES, CutSize, ModelSize, RunSize
from shoal.spec.task import MOST_LOSS_PARTS
from shoal.spec.whole_footprint import activations, common_regions, of_worker, saved_copy

COUNTER_BYTES = 64
"""A cache line for each, so that writers do not disturb one another."""
SUMS_PER_SLOT = 5 + MOST_LOSS_PARTS
"""Numbers that a slot's batches come to: loss, weight, what was skipped and used, what the loss is told with."""


WHOLE_JOURNAL = "journal: model and state before an update"


def arena_regions(
    model: ModelSize, run: RunSize, cut: CutSize, *, follows_speed: bool, journals: bool, is_spread: bool = False
) -> tuple[MemoryRegion, ...]:
    """All of the segment: parameters and optimizer state once, gradients once per slot.

    `is_spread`: other hosts have some slots.
    """
    slots, places, rows = range(run.slots), range(run.workers), run.steps + 1
    seen, half = run.precision
    undone = 1 + SCALAR_BYTES * model.scalars
    tables = {
        "counters": COUNTER_BYTES * num_counters(run.slots, run.workers),
        "results": 8 * SUMS_PER_SLOT * run.slots,
        "touched": len(model.trained) * run.slots,
        "norms": 8 * model.units,
        "losses": 8 * rows,
        "counts": 4 * run.slots * rows,
        "pace": 8 * run.slots,
        "sizes": 4 * run.slots * rows * follows_speed,
        "seen": seen,
        "half": half,
        "early": 4 * (run.slots + 1) * sum(map(len, cut.shards)) * is_spread,
        "table": run.table,
        "buffers": model.moving,
        **{f"buffers/{slot}": model.moving for slot in slots},
    }
    images = {"old-params": model.laid_out if run.image else 0, "image/0": run.image, "image/1": run.image}
    journal = {f"undo/{place}": cut.largest_chunk * (1 + model.kept) for place in places}
    journal |= {f"undo-scalars/{place}": cut.pieces * undone for place in places}
    return (
        *(MemoryRegion(name=name, what=TABLES, num_bytes=size) for name, size in tables.items()),
        MemoryRegion(name="frozen", what="frozen parameters", num_bytes=sum(map(aligned, model.frozen))),
        *(MemoryRegion(name=name, what=WHOLE_JOURNAL, num_bytes=size) for name, size in images.items()),
        *model.regions(cut.pieces),
        *(
            MemoryRegion(name=f"gradients/{slot}", what="gradients of a slot", num_bytes=model.laid_out)
            for slot in slots
        ),
        *(
            MemoryRegion(name=name, what="journal: a chunk as it was", num_bytes=size, is_used=journals)
            for name, size in journal.items()
        ),
    )


def num_counters(slots: int, places: int) -> int:
    """Of `Marks`: one for all, one for each slot, six for each place."""
    return 1 + slots + 6 * places


def arena_footprint(regions: tuple[MemoryRegion, ...], model: ModelSize, run: RunSize, cut: CutSize) -> Footprint:
    """Workers have little besides the segment, but for a moment: each builds the model before it lets it go."""
    own = [
        of_worker("the model as it is built", model.parameters + sum(model.frozen), Stay.OPENING),
        of_worker("buffers", model.buffers + model.moving),
        of_worker("a chunk's sum", cut.largest_chunk),
        activations(run.one),
        *saved_copy(model, run),
        *common_regions(run),
    ]
    if model.whole_state is not None:
        summed = model.parameters + model.whole_state
        own.append(of_worker("worker 0's gradient and optimizer state", summed, Stay.TRAINING))
    per_worker = -(-run.slots // run.workers)
    return Footprint(
        shared=regions,
        worker=tuple(own),
        workers=run.workers,
        flows=(
            Flow(
                what="gradients written",
                medium=Medium.MEMORY,
                num_bytes=per_worker * model.laid_out,
            ),
            Flow(
                what="all slots' gradients of its part read",
                medium=Medium.MEMORY,
                num_bytes=run.slots * model.laid_out // run.workers,
            ),
        ),
    )
