"""The footprint of workers that hold parts of a model: of its state, of its layers' width, or of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.spec.footprint import Flow, Footprint, Medium, MemoryRegion, Stay
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.whole_footprint import common_regions, of_worker, talk_regions

if TYPE_CHECKING:
    from shoal.spec.model_parallel import Mesh

_PROBED = 5
"""Where layers are cut by width, gradients are compared one by one in double precision: so many times one."""
_TRIALS = 16 << 20
"""Before a model is cut, its layers are tried: how they can be cut by width, or what they cost."""


def cut_footprint(mesh: Mesh, model: ModelSize, run: RunSize, cut: CutSize) -> Footprint:
    """Of the worker that needs most."""
    stages = cut_evenly(model.trained, mesh.pipeline)
    # Within a limit what others hold must not count, so that workers keep their own.
    shares_state = mesh.shard > 1 and cut.talk > 0 and not run.is_limited
    rows = [
        (
            *stage_regions(
                mesh, sum(stage), _units(stage, mesh, cut), model.kept, uncut=cut.uncut, is_shared=shares_state
            ),
            *_passes(mesh, run, number, largest=max(stage, default=0)),
        )
        for number, stage in enumerate(stages)
    ]
    besides = [of_worker("buffers and frozen parameters", model.fixed), *common_regions(run)]
    if not run.is_limited:
        besides.append(of_worker("the model as it is built", model.parameters, Stay.OPENING))
    if mesh.pipeline > 1:
        tried = _TRIALS + max(model.trained, default=0)
        besides.append(of_worker("layers as their costs are measured", tried, Stay.OPENING))
    shared = (*talk_regions(cut), *(_row_regions(mesh, model, cut) if shares_state else ()))
    found = [Footprint(shared=shared, worker=(*row, *besides), workers=run.workers) for row in rows]
    most = max(found, key=lambda each: each.own_bytes)
    flows = _flows(mesh, model, run, cut, shares_state=shares_state)
    return Footprint(shared=shared, worker=most.worker, workers=run.workers, flows=flows)


def updated_bytes(mesh: Mesh, model: ModelSize, cut: CutSize) -> int:
    """Of the parameters that one worker updates, of the one that has most."""
    return max(
        -(-_width(mesh, sum(stage), cut.uncut) // mesh.shard) for stage in cut_evenly(model.trained, mesh.pipeline)
    )


def stage_need(mesh: Mesh, trained: int, largest: int, kept: int) -> int:
    """What one stage's values need at their worst moment, without activations; `largest`: of one parameter."""
    return Footprint(worker=tuple(stage_regions(mesh, trained, (largest, 0), kept))).own_bytes


def _row_regions(mesh: Mesh, model: ModelSize, cut: CutSize) -> Iterator[MemoryRegion]:
    """What workers in a row share: parameters once, and each worker's gradients, of the whole or of a block."""
    whole = _width(mesh, -(-model.parameters // mesh.pipeline), cut.uncut)
    rows = mesh.num_workers // mesh.shard
    # Those of one block are summed while the next one's come.
    found = whole if mesh.level == 1 else 2 * _width(mesh, max(_units(model.trained, mesh, cut)), cut.uncut)
    for row in range(rows):
        yield MemoryRegion(name=f"row/{row}", what="parameters of workers in a row", num_bytes=whole)
    for worker in range(mesh.num_workers):
        yield MemoryRegion(name=f"found/{worker}", what="gradients that a worker finds", num_bytes=found)


def _width(mesh: Mesh, num_bytes: int, uncut: float) -> int:
    """What the tensor axis leaves a worker of so many bytes; `uncut`: the share that stays as wide as it was."""
    whole = int(num_bytes * uncut)
    return whole - -(num_bytes - whole) // mesh.tensor


def stage_regions(
    mesh: Mesh, trained: int, units: Sequence[int], kept: int, *, uncut: float = 0.0, is_shared: bool = False
) -> Iterator[MemoryRegion]:
    """Of one stage's values, as wide as the tensor axis leaves them; `units`: of blocks that are gathered
    together, and of the rest; `is_shared`: parameters and what is found for them lie in the host's memory."""
    whole = _width(mesh, trained, uncut)
    if mesh.tensor > 1 and mesh.pipeline == 1:
        yield of_worker("a gradient as it is compared", _PROBED * max(units) + _TRIALS, Stay.OPENING)
    if mesh.shard > 1:
        if is_shared:
            part = -(-whole // mesh.shard)
            yield of_worker("optimizer state of a worker", kept * part, Stay.TRAINING)
            yield of_worker("gradients of a worker", part, Stay.TRAINING)
        else:
            yield from _sharded_regions(mesh, whole, [_width(mesh, unit, uncut) for unit in units], kept)
        summed = whole if mesh.level == 1 else -(-whole // mesh.shard)
    else:
        summed = whole
        yield of_worker("parameters of a worker", whole)
        yield of_worker("gradients of a worker", whole, Stay.TRAINING)
        yield of_worker("optimizer state of a worker", kept * whole, Stay.TRAINING)
    if mesh.data > 1:
        yield of_worker("gradients as copies sum them", summed, Stay.TRAINING)


def _sharded_regions(mesh: Mesh, whole: int, units: Sequence[int], kept: int) -> Iterator[MemoryRegion]:
    """State cut over workers: what is used is gathered, and its gradients go to their owners, unit by unit."""
    part = -(-whole // mesh.shard)
    *blocks, root = units
    largest = max(blocks, default=0)
    yield of_worker("parameters of a worker", part if mesh.level == 3 else whole)
    yield of_worker("a block as it is cut", largest + root, Stay.OPENING)
    yield of_worker("optimizer state of a worker", kept * part, Stay.TRAINING)
    if mesh.level == 1:
        yield of_worker("gradients of a worker", whole, Stay.TRAINING)
        yield of_worker("a block's gradients as they are summed", max(largest, root), Stay.TRAINING)
        return
    yield of_worker("gradients of a worker", part, Stay.TRAINING)
    # What runs has its parameters (level 3) and its gradients, or these and their copy for the sum.
    yield of_worker("blocks whole, while they are used", 2 * (largest + root), Stay.TRAINING)


def _units(stage: Sequence[int], mesh: Mesh, cut: CutSize) -> Sequence[int]:
    """What is gathered together; where a pipeline has cut the model before, single parameters stand for blocks."""
    return cut.units if cut.units and mesh.pipeline == 1 else (max(stage, default=0), 0)


def _passes(mesh: Mesh, run: RunSize, stage: int, *, largest: int) -> list[MemoryRegion]:
    """Of the micro-batches that are on their way through a worker's stages at a time, in the part that is its own;
    `largest`: of one parameter, whose gradient is among them."""
    one, parts = run.one, mesh.num_stages * mesh.tensor
    made = max(0, one.activations - largest) if mesh.shard > 1 and mesh.level > 1 else one.activations
    kept = -(-made // parts) * micro_batches_held(mesh, stage)
    travel = 2 * one.widest * (mesh.pipeline > 1 or mesh.tensor > 1)
    return [of_worker("activations and temporaries", kept + one.batch + travel, Stay.TRAINING)]


def micro_batches_held(mesh: Mesh, worker: int) -> int:
    """Of the schedule: the most parts that a worker's stages keep at a time, each stage counted by itself."""
    if mesh.pipeline == 1:
        return 1
    if mesh.schedule == "gpipe":
        return mesh.num_microbatches * mesh.stages_per_worker
    if mesh.schedule == "zero-bubble":
        return min(mesh.pipeline, mesh.num_microbatches)
    ahead = mesh.pipeline - worker
    if mesh.stages_per_worker > 1:
        ahead += mesh.pipeline * mesh.stages_per_worker
    return min(ahead, mesh.num_microbatches * mesh.stages_per_worker)


def _flows(mesh: Mesh, model: ModelSize, run: RunSize, cut: CutSize, *, shares_state: bool) -> tuple[Flow, ...]:
    """What one worker sends in a step; parameters that lie where all find them are not sent."""
    part = model.parameters // (mesh.pipeline * mesh.tensor)
    flows: list[Flow] = []
    medium = Medium.MEMORY if cut.talk else Medium.NETWORK

    def sent(what: str, num_bytes: int) -> None:
        flows.append(Flow(what=what, medium=medium, num_bytes=num_bytes))

    if mesh.shard > 1:
        if not shares_state:
            sent("parameters gathered", {1: 1, 2: 1, 3: 2}[mesh.level] * part * (mesh.shard - 1) // mesh.shard)
        sent("gradients to their owners", part * (mesh.shard - 1) // mesh.shard)
    if mesh.data > 1:
        summed = part if mesh.shard == 1 or mesh.level == 1 else part // mesh.shard
        sent("gradients summed over copies", 2 * (mesh.data - 1) * summed // mesh.data)
    if mesh.pipeline > 1:
        sent("results between stages, and back, at most", 2 * run.one.widest * mesh.num_microbatches)
    if mesh.tensor > 1:
        sent("results of a layer that is cut, at most", 2 * run.one.widest)
    return tuple(flows)


def layered_footprint(model: ModelSize, run: RunSize, cut: CutSize, *, returns: bool) -> Footprint:
    """Each worker builds the model whole and keeps its layers; `returns`: gradients travel back."""
    parts = cut.parts or tuple(sum(part) for part in cut_evenly(model.trained, run.workers))
    own = max(parts)
    share = own / max(1, model.parameters)
    kept, travel = int(share * run.one.activations), 2 * run.one.widest
    return Footprint(
        shared=talk_regions(cut),
        worker=(
            of_worker("parameters of a worker's layers", own),
            of_worker("the model as it is built", model.parameters - own, Stay.OPENING),
            of_worker("buffers and frozen parameters", model.fixed),
            of_worker("gradients of a worker's layers", own, Stay.TRAINING),
            of_worker("optimizer state of a worker's layers", int(share * model.state), Stay.TRAINING),
            of_worker("activations and temporaries", kept + run.one.batch + travel, Stay.TRAINING),
            *common_regions(run),
        ),
        workers=run.workers,
        flows=(
            Flow(
                what="results between layers, at most",
                medium=Medium.MEMORY if cut.talk else Medium.NETWORK,
                num_bytes=(1 + returns) * run.one.widest,
            ),
        ),
    )


def cut_evenly(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """A row of sizes in so many runs, the largest of which is as small as it can be; the last may be empty."""
    least, most = max(sizes, default=0), sum(sizes)
    while least < most:
        limit = (least + most) // 2
        least, most = (least, limit) if len(list(_runs(sizes, limit))) <= count else (limit + 1, most)
    runs = list(_runs(sizes, most))
    return runs + [()] * (count - len(runs))


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Runs of at most `limit` each, which no single size exceeds."""
    run: list[int] = []
    for size in sizes:
        if run and sum(run) + size > limit:
            yield tuple(run)
            run = []
        run.append(size)
    if run:
        yield tuple(run)
