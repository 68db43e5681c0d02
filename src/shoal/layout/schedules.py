"""Which worker has which stage of a cut model, and in which order each takes parts of the batch forward and back.

In a pipeline stages go round, so that neighbouring stages are on neighbouring workers. Where a worker has several
stages, micro-batches go round in groups: a worker takes a whole group through one of its stages before it turns to
the next. Every stage sees the micro-batches in ascending order, forward as well as back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from shoal.errors import unknown
from shoal.spec.checks import require_count
from shoal.spec.model_parallel import SCHEDULES, Mesh


class Kind(Enum):
    """What is done with one micro-batch at one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradients of the stage's input and of its weights, in one go."""
    BACKWARD_INPUT = "backward input"
    """Only what the stage before waits for."""
    BACKWARD_WEIGHT = "backward weight"
    """The rest, for which nobody waits."""


@dataclass(frozen=True)
class Action:
    """One entry of a worker's list."""

    kind: Kind
    stage: int
    microbatch: int


Actions = tuple[Action, ...]
"""What one worker does, in order."""
Costs = Mapping[Kind, float]
Visit = tuple[int, int]
"""A stage and a micro-batch."""

UNIT_COSTS: Costs = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """Who has which stage, and who does what when."""

    name: str
    """One of `SCHEDULES`; all but `gpipe` take it that stages go round, and each worker has as many."""
    homes: tuple[int, ...]
    """By stage: its worker. A stage comes after those whose results it reads."""
    num_workers: int

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    def worker_of(self, stage: int) -> int:
        """Who has a stage."""
        return self.homes[stage]

    def stages_of(self, worker: int) -> list[int]:
        """What a worker has, in order."""
        return [stage for stage, home in enumerate(self.homes) if home == worker]

    def actions(self, microbatches: int = 1) -> tuple[Actions, ...]:
        """By worker: what it does with so many micro-batches, one or more of them."""
        require_count("pipeline", "microbatches", microbatches)
        return tuple(self._of_worker(worker, microbatches) for worker in range(self.num_workers))

    def _of_worker(self, worker: int, microbatches: int) -> Actions:
        own, workers = self.stages_of(worker), self.num_workers
        groups = _groups(microbatches, microbatches if self.name == "gpipe" else workers)
        forwards = [(stage, each) for group in groups for stage in own for each in group]
        backwards = [(stage, each) for group in groups for stage in reversed(own) for each in group]
        behind = workers - 1 - worker
        if self.name == "gpipe":
            ahead = len(forwards)
        elif len(own) == 1:
            ahead = behind + 1
        else:
            ahead = (len(own) - 1) * len(groups[0]) + 2 * behind + 1
        lag = worker if self.name == "zero-bubble" else None
        return _alternate(forwards, backwards, min(ahead, len(forwards)), lag)


def make_schedule(name: str, *, workers: int, per_worker: int = 1) -> StageSchedule:
    """Of a pipeline whose stages go round: stage `s` is on worker `s % workers`."""
    require_count("pipeline", "workers", workers)
    require_count("pipeline", "per_worker", per_worker)
    if name not in SCHEDULES:
        raise unknown("pipeline: schedule", name, SCHEDULES)
    homes = tuple(stage % workers for stage in range(workers * per_worker))
    return StageSchedule(name=name, homes=homes, num_workers=workers)


def schedule_of(mesh: Mesh) -> StageSchedule:
    """Of the pipeline axis."""
    return make_schedule(mesh.schedule, workers=mesh.pipeline, per_worker=mesh.stages_per_worker)


def _groups(microbatches: int, least: int) -> list[range]:
    """Micro-batches in as many groups as have at least so many each, of nearly one size; the first are largest."""
    count = max(1, microbatches // least)
    starts = [-(-microbatches * number // count) for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _alternate(forwards: Sequence[Visit], backwards: Sequence[Visit], ahead: int, lag: int | None) -> Actions:
    """Warm-up: so many forwards; then one back for each one forward; then the backwards that are left.

    With a `lag`, the backward pass is split: the weights' part follows so many visits later, where this worker
    would wait at the end. The last worker, which would wait longest, lags most, and holds no more for it than
    the first worker holds anyway.
    """
    actions = [Action(Kind.FORWARD, *visit) for visit in forwards[:ahead]]
    for done, visit in enumerate(backwards):
        if lag is None:
            actions.append(Action(Kind.BACKWARD, *visit))
        else:
            actions.append(Action(Kind.BACKWARD_INPUT, *visit))
            if done >= lag:
                actions.append(Action(Kind.BACKWARD_WEIGHT, *backwards[done - lag]))
        if ahead + done < len(forwards):
            actions.append(Action(Kind.FORWARD, *forwards[ahead + done]))
    if lag:
        actions += [Action(Kind.BACKWARD_WEIGHT, *visit) for visit in backwards[-lag:]]
    return tuple(actions)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How a schedule runs where every action takes a known time and sending takes none."""

    duration: float
    busy: tuple[float, ...]
    """By worker: how long it computes."""
    ends: Mapping[Action, float]
    held: tuple[int, ...]
    """By worker: the most micro-batches of which it keeps activations at a time, over its stages."""

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they wait."""
        return 1 - sum(self.busy) / (self.duration * len(self.busy))


def simulate(schedule: Sequence[Actions], costs: Costs | Callable[[Action], float] = UNIT_COSTS) -> Simulation:
    """Run a schedule on paper; ValueError where its workers would wait for each other for ever."""
    cost = costs if callable(costs) else lambda action: costs[action.kind]
    last = max(action.stage for actions in schedule for action in actions)
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * len(schedule), [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(schedule):
            while positions[worker] < len(actions):
                action = actions[positions[worker]]
                ready = _ready_at(action, last, ends)
                if ready is None:
                    break
                clocks[worker] = ends[action] = max(clocks[worker], ready) + cost(action)
                positions[worker] += 1
                moved = True
    waiting = [
        actions[position] for actions, position in zip(schedule, positions, strict=True) if position < len(actions)
    ]
    if waiting:
        raise ValueError(f"the schedule never ends: {waiting} wait for each other")
    return Simulation(
        duration=max(clocks),
        busy=tuple(sum(map(cost, actions)) for actions in schedule),
        ends=ends,
        held=tuple(map(_most_held, schedule)),
    )


def _ready_at(action: Action, last: int, ends: Mapping[Action, float]) -> float | None:
    """When all that an action needs is there; None: not yet known."""
    stage, microbatch = action.stage, action.microbatch
    forward = Action(Kind.FORWARD, stage, microbatch)
    if action.kind is Kind.FORWARD:
        needed = [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    elif action.kind is Kind.BACKWARD_WEIGHT:
        needed = [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
    else:
        later = [Action(action.kind, stage + 1, microbatch)] if stage < last else []
        needed = [forward, *later]
    if any(one not in ends for one in needed):
        return None
    return max((ends[one] for one in needed), default=0.0)


def _most_held(actions: Actions) -> int:
    held = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind is not Kind.BACKWARD_INPUT:  # the weights' gradients need them still
            held -= 1
    return most
