"""What it costs a step to be watched: callbacks, metrics and loggers switched on, beside a run without them.

Both runs evaluate as often, write their events and draw their chart. The model is that of the digits, whose step
is hardly more than what happens around it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.utils.data import TensorDataset

from benchmarks import tasks
from benchmarks.bars import BarFinding, Ceiling
from benchmarks.measurement import Timeline
from benchmarks.models import CYCLE, WORKLOADS, warm_up_steps
from shoal import metrics
from shoal.bench.laps import rotated
from shoal.launch.runs import train
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Callback, CallbackContext, Cluster, Job, Task

MODEL, WORKERS, STEPS, EVALUATE_EVERY = "digits", 2, 5000, 100
WINDOW = 500
"""Steps in which all that is done now and then is done several times."""
PLAIN, WATCHED = "digits, plain", "digits with callbacks, metrics, loggers"
LOGGERS = ("csv", "tensorboard")
CEILING = Ceiling(
    model=MODEL, subject="callbacks, metrics and loggers, a step's extra", peer="none of them", most=50, unit="µs"
)


class Watch(Callback):
    """Hears of every step and every evaluation, and logs a number each time."""

    def on_step(self, context: CallbackContext) -> None:
        context.log("loss of this step", context.loss)

    def on_evaluation(self, context: CallbackContext) -> None:
        context.log("accuracy of this step", context.results["accuracy"])


def task(steps: int, watched: bool) -> Task:
    """The digits model, evaluated on as many samples as eight steps train on."""
    workload, found = WORKLOADS[MODEL](), tasks.task(MODEL, processes=WORKERS, steps=steps)
    batches = [workload.batch(0, number) for number in range(CYCLE)]
    test = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    found = replace(found, test=test, evaluate_every=EVALUATE_EVERY)
    if not watched:
        return found
    from sklearn.metrics import f1_score

    how_good = {"accuracy": metrics.accuracy, "top 3": metrics.top_k(3)}
    return replace(
        found,
        metrics={**how_good, "f1": metrics.whole(f1_score, average="macro")},
        callbacks=[Watch()],
    )


def measure_watching(
    rounds: int,
    *,
    steps: int = STEPS,
    on_measured: Callable[[str, float], None] = lambda name, samples_per_s: None,
) -> BarFinding:
    """How much longer a step takes, round by round. All the time counts: what was noted is told now and then."""
    extra_us = []
    batch = WORKLOADS[MODEL]().batch_per_process * WORKERS
    for turn in range(rounds):
        step_s: dict[str, float] = {}
        for name in rotated([PLAIN, WATCHED], turn):
            step_s[name] = step_seconds(steps, watched=name == WATCHED)
            on_measured(name, batch / step_s[name])
        extra_us.append((step_s[WATCHED] - step_s[PLAIN]) * 1e6)
    return BarFinding(ceiling=CEILING, values=tuple(extra_us))


def step_seconds(steps: int, *, watched: bool) -> float:
    """How long a step takes of a run as users start it."""
    first = warm_up_steps(steps)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "timeline"
        job = Job(
            target="benchmarks.watched:task",
            args={"steps": first + steps, "watched": watched},
            cluster=Cluster(workers=WORKERS, threads=1),
            options={"timeline": str(path)},
        )
        train(job, runs=folder, log=LOGGERS if watched else None, progress=False, output=io.StringIO())
        return typical_step_s(read_timeline(path)[first:])


def typical_step_s(timeline: Timeline) -> float:
    """The mean step of each window, the median of these: what is done now and then counts, and what other users of
    the machine take of a few windows does not."""
    marks = [when for when, _ in timeline[::WINDOW]]
    return median((after - before) / WINDOW for before, after in pairwise(marks))
