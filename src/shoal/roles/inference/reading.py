"""A saved model and the data that it is to see, under any strategy: also a model that no worker can hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shoal.errors import SpecError
from shoal.feed.feed import Feed
from shoal.feed.shipping import open_dataset
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.roles.loading.start import read_start
from shoal.roles.loading.task import load_task
from shoal.roles.memory.limit import make_parking
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, Task, World
from shoal.step.work import Work
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.base import Company, Extent, Setting


def for_use(task: Task) -> Task:
    """The task for those who train nothing: what training asks for must not stand in the way. Its optimizer keeps
    nothing, and takes parameters that are cut."""
    return replace(
        task,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        scheduler=None,
        clip_norm=None,
        skip_loss_below=None,
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A saved model, and the data that it is to see."""

    task: Task
    replica: Replica
    feed: Feed
    length: int
    """Samples of the data set."""

    @property
    def num_batches(self) -> int:
        """Batches of all samples; the last may be smaller."""
        return -(-self.length // self.task.batch_size)

    def samples(self, number: int) -> np.ndarray:
        """Those of a batch."""
        size = self.task.batch_size
        return np.arange(number * size, min((number + 1) * size, self.length))

    def sample(self) -> Any:
        """The first batch, for whoever must see the model run before it computes."""
        return self.feed.batch(self.samples(0))

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False) -> Work:
        """There are no steps."""
        raise AssertionError("nothing is trained with a saved model")


def read(job: Job, world: World) -> Reading:
    """What a job names: the model of a run, and a data set of its task."""
    task = for_use(load_task(job))
    part = job.options.get("data", "test")
    if part not in ("train", "test"):
        raise SpecError(f"The data must be train or test, found {part!r}.")
    if getattr(task, part) is None:
        raise SpecError(f"{job.target} has no {part} set; choose the other with --data, or give the task one.")
    dataset = open_dataset(task, part, lambda: world)
    length, near = len(dataset), Feed(task, dataset)  # models are made on the CPU, whatever they compute on
    replica = Replica(
        task,
        device=world.device,
        sample=lambda: near.batch(np.arange(min(2, length))),
        start=read_start(job),
        parking=make_parking(job),
    )
    return Reading(task=task, replica=replica, feed=Feed(task, dataset, device=world.device), length=length)


def open_strategy(reading: Reading, job: Job, world: World, extent: Extent, reporter: Reporter) -> Strategy:
    """The job's strategy, with the model's values in it."""
    strategy = make_strategy(job.spec, world, job.num_slots)
    strategy.open(
        reading.replica,
        Setting(
            world=world,
            conduct=job.conduct,
            extent=extent,
            company=Company(report=reporter.line),
            supply=reading,
            memory_bytes=job.cluster.memory_bytes,
        ),
    )
    reading.replica.start = Start()  # the model has its values now; nobody needs them twice
    return strategy
