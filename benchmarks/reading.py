"""What slow data costs one worker that has processes read it (`loaders=2`), beside data in memory.

One reader takes processor time, and has the second core for it; the other one waits, as for a disk or a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, TensorDataset

from benchmarks import tasks
from benchmarks.bars import Bar, BarVerdict
from benchmarks.models import WORKLOADS, warm_up_steps
from benchmarks.ordeal import throughput
from benchmarks.recorded import record
from shoal.bench.laps import rotated
from shoal.spec import Cluster, Job, Task

MODEL, LOADERS, STEPS = "mlp", 2, 40
MEMORY = "data in memory"
BURNS, SLEEPS = "a reader that computes 0.7 of a step", "a reader that waits 1.5 steps"
READERS = {BURNS: ("burn", 0.7), SLEEPS: ("sleep", 1.5)}
"""What it does with its time, and how long it takes for a batch, in steps."""
BARS = tuple(Bar(MODEL, name, MEMORY, 0.95) for name in READERS)


def burn(seconds: float) -> None:
    """Take so much time of the processor, whoever else wants it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


SPEND: dict[str, Callable[[float], None]] = {"burn": burn, "sleep": time.sleep}


class SlowlyRead(Dataset[Any]):
    """Rows of which each takes a while to read."""

    def __init__(self, rows: TensorDataset, spend: Callable[[float], None], seconds: float) -> None:
        self._rows = rows
        self._spend = spend
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        self._spend(self._seconds)
        return self._rows[number]


def task(model: str, steps: int, spends: str = "", batch_s: float = 0.0) -> Task:
    """The model's task for one worker, whose batches take so long to read; without `spends` they lie in memory."""
    workload, found = WORKLOADS[model](), tasks.task(model, processes=1, steps=steps)
    if not spends:
        return found
    spend, sample_s = SPEND[spends], batch_s / workload.batch_per_process
    rows = tasks.samples(workload, processes=1)
    return replace(found, train=lambda: SlowlyRead(rows, spend, sample_s), loaders=LOADERS)


def measure_reading(
    rounds: int,
    *,
    model: str = MODEL,
    steps: int = STEPS,
    on_measured: Callable[[str, float], None] = lambda name, samples_per_s: None,
) -> list[BarVerdict]:
    """The speed with each reader over that of data in memory, round by round."""
    speeds: dict[str, list[float]] = {name: [] for name in (MEMORY, *READERS)}
    # How long a reader takes follows from a step of this machine, which a run of its own shows.
    step_s = WORKLOADS[model]().batch_per_process / samples_per_s(model, steps)
    for turn in range(rounds):
        for name in rotated(list(speeds), turn):
            spends, share = READERS.get(name, ("", 0.0))
            speeds[name].append(samples_per_s(model, steps, spends, share * step_s))
            on_measured(name, speeds[name][-1])
    return [
        BarVerdict(
            bar=bar,
            ratios=tuple(ours / theirs for ours, theirs in zip(speeds[bar.subject], speeds[MEMORY], strict=True)),
        )
        for bar in BARS
    ]


def samples_per_s(model: str, steps: int, spends: str = "", batch_s: float = 0.0) -> float:
    """All samples over all the time of a run in fresh processes, but for its first steps."""
    first = warm_up_steps(steps)
    found = record(
        Job(
            target="benchmarks.reading:task",
            args={"model": model, "steps": first + steps, "spends": spends, "batch_s": batch_s},
            cluster=Cluster(workers=1, threads=1),
        )
    )
    return throughput(found.timeline[first:])
