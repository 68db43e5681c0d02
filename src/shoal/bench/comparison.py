"""Strategies side by side on the user's task: who can train it, then rounds in which all take turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal.bench.laps import LEAST_STEPS, BenchRow, Course, Lap, rotated
from shoal.bench.report import ONE_PROCESS, BenchReport
from shoal.bench.track import TaskFacts, Track
from shoal.errors import Interrupted, ShoalError, SpecError
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, start_zygote
from shoal.spec import Cluster, Job, parse_strategy
from shoal.spec.checks import require_count
from shoal.spec.strategy import ENTRY_POINTS, known_strategies

USUAL = ("data", "ps", "ps:sync=asp", "sharded", "tensor", "pipeline", "layer")
"""Each strategy as it is without keys, and servers without lockstep. A mesh needs sizes, so it must be named."""
SECONDS = 3.0
MOST_STEPS = 500
"""Where a time is given: with more, strategies that are much slower than one process would take for ever."""

Progress = Callable[[float, str], None]
"""Takes how much of all is done, from 0 to 1, and what is run now."""


@dataclass(frozen=True, kw_only=True)
class BenchOrder:
    """What to compare."""

    target: str
    """`path.py:factory`, with its whole path."""
    strategies: Sequence[str]
    """Each in its written form."""
    cluster: Cluster
    args: Mapping[str, Any] = field(default_factory=dict)
    """Of the factory."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the task that are changed."""
    precision: str = "fp32"
    rounds: int = 3
    steps: int | None = None
    """Steps that count in each run; None: as many as one process takes in so many seconds."""
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        require_count("bench", "rounds", self.rounds)
        if self.steps is not None:
            require_count("bench", "steps", self.steps, least=LEAST_STEPS)
        if not self.seconds > 0:
            raise SpecError(f"bench: seconds must be above 0, found {self.seconds:g}.")
        if self.cluster.workers < 2 or self.cluster.max_workers is not None:
            raise SpecError(
                f"bench: strategies are compared on a number of workers, beside one process, but workers="
                f"{self.cluster.written_workers}; use 2 or more."
            )

    def job(self, strategy: str) -> Job:
        """A run under this strategy; raises what the job's own facts refuse."""
        return Job(
            target=self.target,
            args=dict(self.args),
            strategy=strategy,
            cluster=self.cluster,
            overrides=dict(self.overrides),
            precision=self.precision,
        )

    def job_alone(self, facts: TaskFacts) -> Job:
        """One process as `shoal train` starts it, on batches as large as those of all workers."""
        batch = {"batch_size": facts.batch_size} if facts.batch_per_worker else {}
        cluster, overrides = replace(self.cluster, workers=1), {**self.overrides, **batch}
        return replace(self.job("data"), cluster=cluster, overrides=overrides)


def compare_strategies(
    order: BenchOrder, *, zygote: ZygoteProcess | None = None, progress: Progress = lambda done, label: None
) -> BenchReport:
    """Measure every strategy that can train the task, in turns. Ctrl-C leaves what was measured until then."""
    with ExitStack() as stack:
        if zygote is None and not os.environ.get(ZYGOTE_VARIABLE):
            zygote = stack.enter_context(start_zygote())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))
        return BenchSession(order, Track(Path(folder), zygote), progress).run()


class BenchSession:
    """One comparison, from the choice of strategies to the last round."""

    def __init__(self, order: BenchOrder, track: Track, progress: Progress) -> None:
        self._order = order
        self._track = track
        self._progress = progress
        self._left_out: dict[str, str] = {}
        self._laps: dict[str, list[Lap]] = {}
        self._runs_done = 0
        self._runs_in_all = 1 + (order.steps is None) + order.rounds * (1 + len(order.strategies))

    def run(self) -> BenchReport:
        """Find out who can train the task, then let them take turns."""
        order = self._order
        jobs = self._possible_jobs()
        facts = self._inspect(jobs)
        alone = order.job_alone(facts)
        course = Course(order.steps or self._choose_steps(alone, facts))
        is_broken_off = not self._take_turns({ONE_PROCESS: alone, **jobs}, course)
        rows = {name: BenchRow(strategy=name, laps=tuple(laps)) for name, laps in self._laps.items() if laps}
        return BenchReport(
            target=order.target,
            workers=order.cluster.workers,
            threads=order.cluster.threads_per_worker,
            threads_alone=alone.cluster.threads_per_worker,
            batch_size=facts.batch_size,
            course=course,
            rounds=order.rounds,
            alone=rows.pop(ONE_PROCESS, None),
            rows=tuple(rows.values()),
            left_out=self._left_out,
            is_broken_off=is_broken_off,
        )

    def _possible_jobs(self) -> dict[str, Job]:
        """By strategy: its run, where nothing that is known without the task speaks against it."""
        jobs = {}
        for strategy in self._order.strategies:
            try:
                jobs[strategy] = self._order.job(strategy)
            except SpecError as refusal:
                self._left_out[strategy] = str(refusal)
        self._require_any(jobs)
        return jobs

    def _inspect(self, jobs: dict[str, Job]) -> TaskFacts:
        """Look at the task, and drop what cannot train it."""
        self._tell("looking at the task")
        facts = self._track.inspect(next(iter(jobs.values())), list(jobs))
        self._runs_done += 1
        for strategy, reason in facts.refusals.items():
            self._leave_out(strategy, reason, jobs)
        self._require_any(jobs)
        return facts

    def _require_any(self, jobs: Mapping[str, Job]) -> None:
        if jobs:
            return
        if len(self._left_out) == 1:
            raise SpecError(next(iter(self._left_out.values())))
        reasons = "\n".join(f"{strategy}: {reason}" for strategy, reason in self._left_out.items())
        raise SpecError(f"bench: none of the strategies can train this task with these workers.\n{reasons}")

    def _choose_steps(self, alone: Job, facts: TaskFacts) -> int:
        """As many steps as one process takes in the time that each run should take."""
        self._tell("how long does a step take?")
        lap = self._track.run(alone, Course(LEAST_STEPS), lambda part: None)
        self._runs_done += 1
        steps = round(self._order.seconds * lap.samples_per_s / facts.batch_size)
        return min(max(steps, LEAST_STEPS), MOST_STEPS)

    def _take_turns(self, jobs: dict[str, Job], course: Course) -> bool:
        """Measure all of them once a round; False where the user broke it off."""
        order = self._order
        self._laps = {name: [] for name in jobs}
        try:
            for turn in range(order.rounds):
                self._runs_in_all = self._runs_done + (order.rounds - turn) * len(jobs)
                for name in rotated(list(jobs), turn):
                    self._measure(name, jobs, course, f"round {turn + 1} of {order.rounds}: {name}")
        except (Interrupted, KeyboardInterrupt):
            if not any(self._laps.values()):
                raise
            return False
        return True

    def _measure(self, name: str, jobs: dict[str, Job], course: Course, label: str) -> None:
        """One run; a strategy that fails is left out from there on, and what it did before does not count."""
        self._tell(label)
        try:
            self._laps[name].append(self._track.run(jobs[name], course, lambda part: self._tell(label, part)))
        except Interrupted:
            raise
        except ShoalError as error:
            if name == ONE_PROCESS:
                raise  # Then there is nothing to compare with, and the task itself is at fault.
            self._leave_out(name, str(error), jobs)
        self._runs_done += 1

    def _leave_out(self, strategy: str, reason: str, jobs: dict[str, Job]) -> None:
        self._left_out[strategy] = reason
        self._laps.pop(strategy, None)
        del jobs[strategy]

    def _tell(self, label: str, part: float = 0.0) -> None:
        self._progress(min(1.0, (self._runs_done + part) / self._runs_in_all), label)


def chosen_strategies(text: str | None) -> list[str]:
    """The strategies of a list, each in its shortest form; without a list the usual ones and what others bring."""
    named = [*USUAL, *sorted(entry_points(group=ENTRY_POINTS).names)] if text is None else split_strategies(text)
    return list(dict.fromkeys(str(parse_strategy(written)) for written in named))


def split_strategies(text: str) -> list[str]:
    """`data,ps:servers=2,sync=asp` names two: a comma also parts the keys of one, and what some keys hold."""
    known = set(known_strategies())
    found: list[str] = []
    for piece in text.split(","):
        name = piece.partition(":")[0].strip()
        has_keys = bool(found) and ":" in found[-1]
        if has_keys and name not in known:
            found[-1] += f",{piece.strip()}"
        else:
            found.append(piece.strip())
    return found
