"""The footprint of workers each of which has the whole model for itself, and what all workers have."""

from __future__ import annotations

from shoal.spec.footprint import Flow, Footprint, Medium, MemoryRegion, Stay
from shoal.spec.model_size import CutSize, ModelSize, PassSize, RunSize

CHUNK_BYTES = 2 << 20
"""Of what our collectives send at once."""
LOOKAHEAD = 8
"""Chunks that may be under way."""


def of_worker(what: str, num_bytes: int, stay: Stay = Stay.ALWAYS) -> MemoryRegion:
    """Memory of a worker's own, which nobody looks for by a name."""
    return MemoryRegion(name=what, what=what, num_bytes=num_bytes, stay=stay)


def common_regions(run: RunSize) -> list[MemoryRegion]:
    """What every worker has, whatever it holds of the model."""
    return [
        of_worker("data sets and the task's own", run.data),
        of_worker("threads, sockets and kernels", run.process),
    ]


def talk_regions(cut: CutSize) -> tuple[MemoryRegion, ...]:
    """What workers that talk through the host's memory lay out for that, besides the segment of the run."""
    return (MemoryRegion(name="talk", what="buffers to talk through", num_bytes=cut.talk),) if cut.talk else ()


def activations(one: PassSize, *, counted: int | None = None) -> MemoryRegion:
    """Of a pass whose gradients are taken away as they come; where they stay, `counted` of their bytes are told of
    elsewhere."""
    most = one.activations if counted is None else max(0, one.with_gradients - counted)
    return of_worker("activations and temporaries", most + one.batch, Stay.TRAINING)


def whole_footprint(model: ModelSize, run: RunSize) -> Footprint:
    """Parameters, gradients and optimizer state in each worker."""
    gradients = of_worker("gradients", model.parameters, Stay.TRAINING)
    regions = _whole_regions(model, run, gradients, activations(run.one, counted=model.parameters))
    return Footprint(worker=regions, workers=run.workers)


def _whole_regions(model: ModelSize, run: RunSize, *besides: MemoryRegion) -> tuple[MemoryRegion, ...]:
    return (
        of_worker("parameters", model.parameters),
        of_worker("buffers and frozen parameters", model.fixed),
        of_worker("optimizer state", model.state, Stay.TRAINING),
        *besides,
        *saved_copy(model, run),
        *common_regions(run),
    )


def saved_copy(model: ModelSize, run: RunSize) -> list[MemoryRegion]:
    """The first worker copies the state, so that it is written while training goes on."""
    if not run.saves:
        return []
    return [of_worker("a copy that is being saved", model.parameters + model.fixed + model.state, Stay.TRAINING)]


def summed_over_sockets(model: ModelSize, run: RunSize, via: str) -> Footprint:
    """Every worker keeps the whole model and one flat gradient, which all sum."""
    num, size = run.workers, model.laid_out
    sent = {"central": (num - 1) * size, "tree": 3 * size, "allgather": (num - 1) * size}  # who sends most
    flow = Flow(
        what="gradients, summed over all workers",
        medium=Medium.NETWORK,
        num_bytes=sent.get(via, 2 * (num - 1) * size // num),
    )
    messages = of_worker("messages under way", min(size, LOOKAHEAD * CHUNK_BYTES), Stay.TRAINING)
    regions = _whole_regions(model, run, of_worker("gradients", size), activations(run.one), messages)
    return Footprint(worker=regions, workers=num, flows=(flow,))


def handed_on(model: ModelSize, run: RunSize, cut: CutSize) -> Footprint:
    """Workers take turns, each alone; who follows gets parameters, buffers and optimizer state, one by one."""
    state = model.parameters + model.fixed + model.state
    # Each is there as it was sent, and once more as it is taken; no pass runs meanwhile.
    under_way = max(0, 2 * max(model.trained, default=0) - run.one.activations - run.one.batch)
    medium = Medium.MEMORY if cut.talk else Medium.NETWORK
    return Footprint(
        shared=talk_regions(cut),
        worker=(*whole_footprint(model, run).worker, of_worker("what is handed on", under_way, Stay.TRAINING)),
        workers=run.workers,
        flows=(Flow(what="model and optimizer state, at the end of a block", medium=medium, num_bytes=state),),
    )
