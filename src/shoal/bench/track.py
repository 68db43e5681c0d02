"""Where the runs take place: one after the other, each in fresh processes, watched by what they tell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.bench.laps import Course, Lap, final_loss, speed
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import inspect_task, run_job
from shoal.observe.events import Event
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Job

PartDone = Callable[[float], None]
"""Takes how much of the present run is done, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What inspection found out about a task."""

    batch_size: int
    """Samples of one step of all workers."""
    batch_per_worker: bool
    refusals: Mapping[str, str]
    """By strategy: why it cannot train this task."""


class Track:
    """Runs jobs and reads off what is compared. Nothing of them is kept but that."""

    def __init__(self, folder: Path, zygote: ZygoteProcess | None) -> None:
        self._folder = folder
        self._zygote = zygote
        self._num_runs = 0

    def inspect(self, job: Job, strategies: Sequence[str]) -> TaskFacts:
        """What the job's task is made of, and which of these strategies cannot train it."""
        folder = self._folder / "inspection"
        folder.mkdir()
        options = {"probe": False, "workers": job.cluster.workers, "strategies": list(strategies)}
        found = inspect_task(job, folder, self._zygote, options)
        return TaskFacts(
            batch_size=found["global_batch"],
            batch_per_worker=found["batch_per_worker"],
            refusals=found["refusals"],
        )

    def run(self, job: Job, course: Course, on_part: PartDone) -> Lap:
        """Train as the job says for as long as the course is."""
        self._num_runs += 1
        path = self._folder / f"timeline-{self._num_runs}"
        # No run has more epochs than steps: all take the same number, however long the task's own training is.
        length = {"max_steps": course.total_steps, "epochs": course.total_steps}
        watch = _LapWatch(course, on_part)
        began = time.time()
        results = run_job(
            replace(
                job,
                overrides={**job.overrides, **length},
                options={"timeline": str(path), "evaluate": False},
            ),
            watch.handle,
            self._zygote,
        )
        timeline = read_timeline(path)
        path.unlink()
        return Lap(
            samples_per_s=speed(timeline, course.window(results["samples"])),
            first_step_s=timeline[0][0] - began,
            peak_memory=watch.peaks,
            loss=final_loss(watch.losses),
        )


class _LapWatch:
    """Reads off a run's events what its timeline does not say."""

    def __init__(self, course: Course, on_part: PartDone) -> None:
        self.losses: list[float] = []
        self.peaks: dict[int, int] = {}
        self._course = course
        self._on_part = on_part

    def handle(self, event: Event) -> None:
        if event.kind == "steps":
            told = event.values["steps"]
            self.losses += [loss for _, loss in told if loss is not None and math.isfinite(loss)]
            if told:
                self._on_part(min(1.0, told[-1][0] / self._course.total_steps))
        elif event.kind == "done" and event.rank is not None:
            memory = event.values.get("memory", {})
            self.peaks[event.rank] = memory.get("gpu", memory.get("host", 0))
