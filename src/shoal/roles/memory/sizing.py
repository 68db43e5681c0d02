"""What a job lays out and what a worker of it needs, found out without training and without the model's values."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.arena import supported
from shoal.datasets import Shipped
from shoal.feed.feed import Feed
from shoal.model.blueprint import Blueprint, cut_of, model_size, whole_state_bytes
from shoal.model.precision import Precision, layers_of
from shoal.roles.training.mean_check import Generators
from shoal.roles.training.training import make_schedule
from shoal.spec import Job, StrategySpec, Task
from shoal.spec.footprint import Footprint
from shoal.spec.model_size import CutSize, ModelSize, PassSize, RunSize
from shoal.spec.task import is_maker
from shoal.step.pass_size import pass_without_values
from shoal.strategies.base import Extent
from shoal.strategies.data.sizes import size_of_run

PROCESS_BYTES = 12 << 20
"""What a worker takes once it has started, whatever it trains: stacks of threads, sockets, tables of kernels."""


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """All that a job's footprint follows from."""

    spec: StrategySpec
    model: ModelSize
    run: RunSize
    cut: CutSize

    @property
    def footprint(self) -> Footprint:
        """By the strategy's own account."""
        return self.spec.footprint(self.model, self.run, self.cut)

    @property
    def limited(self) -> Footprint:
        """What it would be within a limit: `--memory` must allow each worker `worker_bytes` of it."""
        return replace(self, run=replace(self.run, is_limited=True)).footprint


def size_up(
    job: Job,
    blueprint: Blueprint,
    *,
    extent: Extent | None = None,
    one: PassSize | None = None,
    data: int = 0,
) -> JobSizes:
    """Of a job whose task is as a worker trains it.

    `one`: what a pass takes, where it was measured; `data`: bytes of what the task has made so far.
    """
    model, workers = model_size(blueprint), job.cluster.places
    if model.whole_state is not None:
        model = replace(model, whole_state=whole_state_bytes(blueprint))
    precision = Precision(job.precision, layers=layers_of(blueprint.module, blueprint.trained))
    extent = extent or Extent(accumulate=blueprint.task.accumulate)
    run = replace(
        size_of_run(blueprint, precision, extent, job.num_slots, workers),
        one=one or PassSize(),
        process=PROCESS_BYTES,
        data=data,
        is_limited=job.cluster.memory_bytes is not None,
        saves=job.checkpoint != "none",
        is_replaceable=job.cluster.spares > 0,
        hosted=-(-workers // (job.cluster.min_workers or workers)),
        shares_memory=supported() and job.cluster.device == "cpu",
    )
    return JobSizes(spec=job.spec, model=model, run=run, cut=_cut(job, blueprint))


def _cut(job: Job, blueprint: Blueprint) -> CutSize:
    try:
        return cut_of(job.spec, blueprint, job.cluster.places)
    except Exception:  # the strategy says what is wrong with the model when it opens
        return CutSize()


def size_of_pass(job: Job, task: Task) -> PassSize | None:
    """Of one micro-batch, where the data is at hand and the task's code runs on tensors without values."""
    if is_maker(task.train) or isinstance(task.train, Shipped):
        return None  # to make the data set twice may take long
    generators = Generators("cpu")
    try:
        batch = first_microbatch(job, task, task.train)
    except Exception:  # whatever is wrong with the data is told where it is read in earnest
        return None
    finally:
        generators.restore()
    return pass_without_values(
        task, batch, precision=job.precision, recompute=job.recompute, numerics=job.numerics
    )


def first_microbatch(job: Job, task: Task, train: Any) -> Any:
    """The first samples, as many as a worker computes at a time."""
    schedule = make_schedule(task, train, job.num_slots, job.cluster.places, job.conduct.clients)
    count = max(1, schedule.batch_size // (job.num_slots * task.accumulate))
    samples = schedule.order.samples(0, 0, min(count, schedule.order.length))
    return Feed(task, train, numerics=job.numerics).batch(samples)


def address_space_bytes() -> int:
    """What this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
