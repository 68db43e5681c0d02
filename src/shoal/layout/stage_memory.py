"""How much memory the stages of a pipeline need, and the split that keeps within what each worker has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shoal.errors import OutOfMemory
from shoal.layout.memory_need import ROOM
from shoal.layout.placement_table import binary_size
from shoal.layout.schedules import Kind, StageSchedule, schedule_of
from shoal.layout.stage_split import NEVER, split_chain
from shoal.spec import Mesh
from shoal.spec.cut_footprint import stage_need

_ATTEMPTS = 8
SLACK = 0.05
"""Splits are taken as equally fast that differ by this share: what was measured is no more exact than that."""


@dataclass(frozen=True, kw_only=True)
class LinkSize:
    """What one link of a model needs, in bytes."""

    trained: Mapping[str, int]
    """By name, the parameters that it uses and the optimizer updates."""
    fixed: Mapping[str, int]
    """By name, other parameters, and buffers."""
    activations: Mapping[str, int]
    """By name, the values that it keeps for the backward pass of one micro-batch."""
    entering: int = 0
    """What travels over a cut before it, for one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class StageDemand:
    """What the stages of a run hold besides their links."""

    mesh: Mesh
    microbatches: int
    kept: int = 0
    """How many values the optimizer keeps for each element of a trained parameter."""
    recomputes: bool = False
    """Whether a stage keeps what enters it alone, and computes the rest again."""
    limit: int | None = None
    """The bytes that each worker may use."""

    def held(self) -> list[int]:
        """By stage: the most micro-batches that are on their way through it at a time."""
        schedule = schedule_of(self.mesh)
        most, now = [0] * schedule.num_stages, [0] * schedule.num_stages
        for action in (action for actions in schedule.actions(self.microbatches) for action in actions):
            if action.kind is Kind.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                now[action.stage] -= 1
        return most


class StageSizes:
    """By number and links of a stage: the bytes that it needs."""

    def __init__(self, links: Sequence[LinkSize], demand: StageDemand) -> None:
        self._links = links
        self._demand = demand
        self._held = demand.held()
        self._rows: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, stage: int, first: int, stop: int) -> int:
        if first not in self._rows:
            self._rows[first] = list(self._row(first))
        weights, activations = self._rows[first][stop - first - 1]
        if self._demand.recomputes:
            return weights + activations + self._held[stage] * self._links[first].entering
        return weights + activations * self._held[stage]

    def _row(self, first: int) -> Iterator[tuple[int, int]]:
        """For stages that begin there, each a link longer: what goes with their parameters, and the activations of
        one micro-batch. What several links have in common counts once."""
        known: set[str] = set()
        trained = largest = fixed = activations = 0
        for link in self._links[first:]:
            new = {name: size for name, size in link.trained.items() if name not in known}
            trained += sum(new.values())
            largest = max(largest, *new.values(), 0)
            fixed += sum(size for name, size in link.fixed.items() if name not in known)
            activations += sum(size for name, size in link.activations.items() if name not in known)
            known.update(link.trained, link.fixed, link.activations)
            yield stage_need(self._demand.mesh, trained, largest, self._demand.kept) + fixed, activations


def split_within(
    costs: Sequence[float], crossings: Sequence[float], links: Sequence[LinkSize], demand: StageDemand
) -> tuple[int, ...]:
    """How many links each stage has: nearly as fast as can be, with stages that their workers can hold."""
    sizes, schedule = StageSizes(links, demand), schedule_of(demand.mesh)

    def split(most: Sequence[float]) -> tuple[int, ...] | None:
        def fits(stage: int, first: int, stop: int) -> bool:
            return sizes(stage, first, stop) <= most[stage]

        return split_chain(costs, schedule.num_stages, crossings, fits=fits, sizes=sizes, slack=SLACK)

    # Some of the limit is better left to what is not counted.
    for allowed in (NEVER,) if demand.limit is None else (ROOM * demand.limit, float(demand.limit)):
        if (counts := _split_for(allowed, split, sizes, schedule)) is not None:
            return counts
    # Whatever it costs.
    forbidden = [NEVER if crossing == NEVER else 0.0 for crossing in crossings]
    counts = split_chain([0.0] * len(links), schedule.num_stages, forbidden, sizes=sizes, slack=SLACK)
    assert counts is not None and demand.limit is not None
    least = max(_by_worker(_by_stage(counts, sizes), schedule))
    if least <= demand.limit:
        return counts
    raise OutOfMemory(
        f"Cluster: memory allows each worker {binary_size(demand.limit)}, but however the model is cut into "
        f"{schedule.num_stages} stages for {schedule.num_workers} workers, one needs at least "
        f"{binary_size(least)} for parameters, gradients, optimizer state and the activations of its "
        "micro-batches; use more workers, more microbatches, --recompute or sharded, or allow more."
    )


def _split_for(
    allowed: float,
    split: Callable[[Sequence[float]], tuple[int, ...] | None],
    sizes: StageSizes,
    schedule: StageSchedule,
) -> tuple[int, ...] | None:
    """The split whose workers need no more than is allowed. Stages of one worker get equal shares; where that is
    too little for one of them, the others get what it leaves."""
    per_worker = len(schedule.stages_of(0))
    counts = split([allowed / per_worker] * schedule.num_stages)
    if counts is not None or per_worker == 1:
        return counts
    most = [allowed] * schedule.num_stages
    for _ in range(_ATTEMPTS):
        counts = split(most)
        if counts is None or not _lower(most, _by_stage(counts, sizes), schedule, allowed):
            return counts
    return None


def _lower(most: list[float], needs: Sequence[int], schedule: StageSchedule, allowed: float) -> bool:
    """Where a worker's stages together need more than is allowed, leave less to all but the largest; whether any
    do."""
    too_much = [worker for worker, need in enumerate(_by_worker(needs, schedule)) if need > allowed]
    for worker in too_much:
        *others, largest = sorted(schedule.stages_of(worker), key=needs.__getitem__)
        for stage in others:
            most[stage] = (allowed - needs[largest]) / len(others)
    return bool(too_much)


def _by_stage(counts: Sequence[int], sizes: StageSizes) -> list[int]:
    cuts = pairwise(accumulate(counts, initial=0))
    return [sizes(stage, first, stop) for stage, (first, stop) in enumerate(cuts)]


def _by_worker(needs: Sequence[int], schedule: StageSchedule) -> list[int]:
    return [sum(needs[stage] for stage in schedule.stages_of(worker)) for worker in range(schedule.num_workers)]
