"""What `ps` lays out: homes for every shard, and buffers for what the workers push.

On one host all of it is one segment that servers and workers map; over tcp every process has its own, but for what
workers push, which lies in their host's. Much of it
is room for what follows a death, which is mapped, and not touched while nobody dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.spec.footprint import LINE_BYTES, PAGE_BYTES, Flow, Footprint, Medium, MemoryRegion, Stay
from shoal.spec.model_size import SCALAR_BYTES, TABLES, ChunkSize, CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import activations, common_regions, of_worker, saved_copy

BUFFERS_PER_SET = 2
"""While servers read one, the worker fills the other."""
BUFFER_SETS = 3
"""A worker that replaces another leaves alone what the other pushed last: servers may not be done with it."""
BUFFERS_PER_SLOT = BUFFERS_PER_SET * BUFFER_SETS
LABEL_BYTES = 7 * 8
JOURNAL_BYTES = 1 << 19
JOURNAL_SHARE = 64
"""A slot of a journal has so many bytes, and this share of the model's: norms of its gradient are noted, too."""
SUMS_PER_COPY = 4
"""Of a whole copy: what its own workers pushed, and the sum of all, of this round and of the last."""
BUFFERS = "gradients on their way"
JOURNAL = "journal of a shard"


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """What of a `ps` spec decides how much is laid out."""

    copies: int
    """Homes for every shard; where a shard is a whole copy of the model, one for each of them."""
    used_copies: int
    """Homes that somebody holds while nobody dies or moves."""
    is_by_host: bool
    """Whether each copy is a whole model, with workers of its own."""
    room: int
    """Slots, or ranks where workers may come and go, that have buffers of their own."""
    used_room: int
    """Those of the workers that the job begins with."""
    marks: bool
    """Whether a copy remembers what it was when all was well."""
    outlives_servers: bool
    """Whether a successor goes on with what a killed server left."""
    servers: int
    shares_memory: bool
    trains_at_workers: bool
    """Whether workers update the model themselves, and push that."""
    unsent_copies: int = 0
    """How often a worker has, for each slot, what compression has left of its pushes."""


def marked(copy: int) -> str:
    """The name of the copy that remembers what another was when it was last marked."""
    return f"marked/{copy}"


def served_regions(plan: ServedPlan, model: ModelSize, cut: CutSize) -> tuple[MemoryRegion, ...]:
    """All of the segment, in its order."""
    return (
        *(region for copy in range(plan.copies) for region in _copy_regions(plan, model, cut, copy)),
        *_buffer_regions(plan, model),
    )


def _copy_regions(plan: ServedPlan, model: ModelSize, cut: CutSize, copy: int) -> Iterator[MemoryRegion]:
    is_used = copy < plan.used_copies
    num_blocks = sum(map(len, cut.shards))
    yield from model.regions(cut.pieces, f"/{copy}", is_used=is_used)
    tables = {f"versions/{copy}": 4 * num_blocks, f"updates/{copy}": 8 * len(cut.shards)}
    tables[f"moving/{copy}"] = model.moving
    if plan.marks:
        yield from model.regions(cut.pieces, f"/{marked(copy)}", is_used=is_used)
        tables[f"moving/{marked(copy)}"] = model.moving
    for name, size in tables.items():
        yield MemoryRegion(name=name, what=TABLES, num_bytes=size, is_used=is_used)
    if plan.outlives_servers:
        yield from _journal_regions(plan, model, cut, copy)
    for number in range(SUMS_PER_COPY if plan.is_by_host else 0):
        name = f"part/{copy}/{number}"
        yield MemoryRegion(name=name, what="sums of a copy's pushes", num_bytes=model.laid_out)


def _journal_regions(plan: ServedPlan, model: ModelSize, cut: CutSize, copy: int) -> Iterator[MemoryRegion]:
    """What a killed server's successor needs besides the values; with a backup nobody writes it."""
    is_used = plan.is_by_host or (copy == 0 and plan.used_copies == 1)
    half = JOURNAL_BYTES + model.laid_out // JOURNAL_SHARE
    for shard, chunks in enumerate(cut.shards):
        name = f"journal/{copy}/{shard}"
        undo = max((undo_bytes(chunk, model) for chunk in chunks), default=0)
        sizes = {name: PAGE_BYTES, f"{name}/0": half, f"{name}/1": half, f"undo/{copy}/{shard}": undo}
        for each, size in sizes.items():
            yield MemoryRegion(name=each, what=JOURNAL, num_bytes=size, is_used=is_used)


def undo_bytes(chunk: ChunkSize, model: ModelSize) -> int:
    """Room for all that an update of a chunk changes, each tensor padded to a cache line."""
    small = chunk.pieces * (1 + SCALAR_BYTES * model.scalars)
    return (1 + model.kept) * (chunk.num_bytes + LINE_BYTES) + small + 2 * LINE_BYTES


def _buffer_regions(plan: ServedPlan, model: ModelSize) -> Iterator[MemoryRegion]:
    for number in range(BUFFERS_PER_SLOT * plan.room):
        slot, buffer = divmod(number, BUFFERS_PER_SLOT)
        is_used = slot < plan.used_room and buffer < BUFFERS_PER_SET  # the others are for successors
        yield MemoryRegion(name=f"gradients/{number}", what=BUFFERS, num_bytes=model.laid_out, is_used=is_used)
        tables = {"touched": len(model.trained), "label": LABEL_BYTES, "moved": model.moving}
        for name, size in tables.items():
            yield MemoryRegion(name=f"{name}/{number}", what=TABLES, num_bytes=size, is_used=is_used)


def served_footprint(
    plan: ServedPlan, regions: tuple[MemoryRegion, ...], model: ModelSize, run: RunSize
) -> Footprint:
    """The segment, and what workers and servers have besides it: each builds the model."""
    own = [
        of_worker("parameters of a worker", model.laid_out),
        of_worker("buffers and frozen parameters", model.fixed + model.moving),
        of_worker("the model as it is built", model.parameters, Stay.OPENING),
        *common_regions(run),
    ]
    if plan.trains_at_workers:
        own += [
            of_worker("gradients", model.parameters, Stay.TRAINING),
            of_worker("optimizer state", model.state, Stay.TRAINING),
            activations(run.one, counted=model.parameters),
        ]
    else:
        own.append(activations(run.one))
    own += saved_copy(model, run)
    server = [of_worker("the model as a server builds it", model.parameters + model.fixed)]
    if model.whole_state is not None and not plan.trains_at_workers:
        summed = model.laid_out + model.whole_state
        server.append(of_worker("gradient and optimizer state of a server", summed))
    if not plan.shares_memory:
        own += _at_worker(plan, regions, model, run)
        server += _at_server(plan, model)
    return Footprint(
        shared=regions if plan.shares_memory else (),
        worker=tuple(own),
        workers=run.workers,
        server=tuple(server),
        servers=plan.servers,
        flows=_flows(plan, model, run),
    )


def _at_worker(
    plan: ServedPlan, regions: tuple[MemoryRegion, ...], model: ModelSize, run: RunSize
) -> list[MemoryRegion]:
    """Over tcp a worker uses buffers of its own, whoever else maps them; to save the state it gathers a copy."""
    slots = range(-(-plan.used_room // run.workers))
    used = {f"gradients/{BUFFERS_PER_SLOT * slot + n}" for slot in slots for n in range(BUFFERS_PER_SET)}
    if run.saves:
        used |= {"params/0", *(f"state/{key}/0" for key in model.mirrored)}
    values = of_worker("parameters as they come", model.laid_out, Stay.TRAINING)
    unsent = of_worker(
        "what has not been sent yet", plan.unsent_copies * len(slots) * model.laid_out, Stay.TRAINING
    )
    return [values, unsent, *(replace(one, is_used=one.what == TABLES or one.name in used) for one in regions)]


def _at_server(plan: ServedPlan, model: ModelSize) -> list[MemoryRegion]:
    """Over tcp a server holds its shards, and copies of others'; and what is pushed to it."""
    share = plan.used_copies / plan.servers
    return [
        of_worker("shards of a server, with optimizer state", int(share * model.laid_out * (1 + model.kept))),
        of_worker(
            "gradients that came to a server",
            int(share * model.laid_out * BUFFERS_PER_SET * plan.used_room),
        ),
    ]


def _flows(plan: ServedPlan, model: ModelSize, run: RunSize) -> tuple[Flow, ...]:
    medium = Medium.MEMORY if plan.shares_memory else Medium.NETWORK
    pushes = -(-plan.used_room // run.workers)
    what = "parameters" if plan.trains_at_workers else "gradients"
    return (
        Flow(what=f"{what} pushed", medium=medium, num_bytes=pushes * model.laid_out),
        Flow(what="parameters fetched", medium=medium, num_bytes=model.laid_out),
    )
