"""Which worker has which stage of a cut model, and in which order each takes parts of the batch forward and back.

In a pipeline stages go round, so that neighbouring stages are on neighbouring workers. Where a worker has several
stages, micro-batches go round in groups: a worker takes a whole group through one of its stages before it turns to
the next. Every stage sees the micro-batches in ascending order, forward as well as back.
"""

from __future__ import annotations

from collections.abc import Sequence
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
Visit = tuple[int, int]
"""A stage and a micro-batch."""


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
