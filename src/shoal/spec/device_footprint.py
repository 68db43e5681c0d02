"""What `data` lays out where workers share a GPU: tables in the host's memory, the model in the GPU's."""

from __future__ import annotations

from shoal.spec.data_footprint import COUNTER_BYTES, SUMS_PER_SLOT, num_counters
from shoal.spec.footprint import Footprint, MemoryRegion, aligned
from shoal.spec.model_size import SCALAR_BYTES, TABLES, CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import common_regions, of_worker, saved_copy

FLAG = "shadow-step"
"""Of which step the shadow is whole."""


def host_regions(model: ModelSize, run: RunSize, cut: CutSize) -> tuple[MemoryRegion, ...]:
    """What processes tell each other, and what of the optimizer's state its own code keeps on the host."""
    rows, scalars = run.steps + 1, SCALAR_BYTES * cut.pieces * model.scalars
    seen, half = run.precision
    tables = {
        "counters": COUNTER_BYTES * (num_counters(run.slots, run.workers) + run.slots),
        "results": 8 * SUMS_PER_SLOT * run.slots,
        "touched": len(model.trained) * run.slots,
        "norms": 0,
        "losses": 8 * rows,
        "counts": 4 * run.slots * rows,
        "pace": 0,
        "sizes": 0,
        "seen": seen,
        "half": half,
        "table": run.table,
        "started": cut.pieces,
        "scalars": scalars,
        "undo": _rooms(cut, cut.pieces + scalars),
    }
    return tuple(MemoryRegion(name=name, what=TABLES, num_bytes=size) for name, size in tables.items())


def device_regions(model: ModelSize, run: RunSize, cut: CutSize, *, journals: bool) -> tuple[MemoryRegion, ...]:
    """Parameters and optimizer state, gradients once per slot, and all that an update changes as it was before."""
    slots = range(run.slots)
    scalars = SCALAR_BYTES * cut.pieces * model.scalars
    shadow = _rooms(cut, (1 + model.kept) * model.laid_out + scalars) if journals else 0
    sizes = {
        "frozen": sum(map(aligned, model.frozen)),
        "scalars": scalars,
        "params": model.laid_out,
        **{f"state/{key}": model.laid_out for key in model.mirrored},
        **{f"gradients/{slot}": model.laid_out for slot in slots},
        "buffers": model.moving,
        **{f"buffers/{slot}": model.moving for slot in slots},
        "shadow": shadow,
        FLAG: SCALAR_BYTES,
    }
    return tuple(MemoryRegion(name=name, what="on the GPU", num_bytes=size) for name, size in sizes.items())


def _rooms(cut: CutSize, num_bytes: int) -> int:
    """For tensors that each begin at a line of their own: of each chunk, a few."""
    return aligned(num_bytes) + 1024 * sum(map(len, cut.shards))


def device_footprint(model: ModelSize, run: RunSize, cut: CutSize) -> Footprint:
    """Of the host's memory: the model is there while it is built, and while it is saved."""
    return Footprint(
        shared=host_regions(model, run, cut),
        worker=(
            of_worker("the model as it is built", model.parameters + model.fixed),
            *saved_copy(model, run),
            *common_regions(run),
        ),
        workers=run.workers,
    )
