"""A saved model and the data that it is to see, under any strategy: also a model that no worker can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.comm.desk_words import STREAM
from shoal.datasets.iterated import ByPosition
from shoal.errors import SpecError
from shoal.feed.feed import Feed
from shoal.feed.records import Records, open_records
from shoal.feed.shipping import open_dataset
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.roles.inference.model_inputs import ModelInputs
from shoal.roles.inference.new_inputs import NewInputs
from shoal.roles.loading.start import read_start
from shoal.roles.loading.task import load_task
from shoal.roles.loading.weighing import derived_weight
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
        ema=None,
        swa=None,
        skip_loss_below=None,
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A saved model, and the data that it is to see."""

    task: Task
    replica: Replica
    feed: Feed
    length: int
    """Samples of the data set; 0 where they are still to come."""
    coming: NewInputs | None = None
    """What will hold the records of a stream, batch by batch."""
    takes: ModelInputs
    """What of a batch the model takes."""
    example: Callable[[], Any]
    """Reads a batch such as the model was trained on."""

    @property
    def num_batches(self) -> int:
        """Batches of all samples; the last may be smaller."""
        return -(-self.length // self.task.batch_size)

    def samples(self, number: int) -> np.ndarray:
        """Those of a batch."""
        size = self.task.batch_size
        return np.arange(number * size, min((number + 1) * size, self.length))

    def inputs(self, samples: np.ndarray) -> Any:
        """What the model takes of a batch of these samples."""
        return self.takes.of(self.feed.batch(samples))

    def sample(self) -> Any:
        """A batch, for whoever must see the model run before it computes."""
        return self.example()

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False) -> Work:
        """There are no steps."""
        raise AssertionError("nothing is trained with a saved model")


def read(job: Job, world: World) -> Reading:
    """What a job names: the model of a run, and a data set of its task, or new data."""
    task, given = for_use(load_task(job)), job.options.get("input")
    part = "train" if given is not None else job.options.get("data", "test")
    if part not in ("train", "test"):
        raise SpecError(f"The data must be train or test, found {part!r}.")
    if getattr(task, part) is None:
        raise SpecError(f"{job.target} has no {part} set; choose the other with --data, or give the task one.")
    known = open_dataset(task, part, lambda: world)
    if given is None and isinstance(known, ByPosition) and known.length is None:
        raise SpecError(f"The {part} set has no length, so this would not end; give it a __len__.")
    new: NewInputs | None = None
    if given is not None:
        records: Records = [] if given == STREAM else open_records(Path(given))
        new = NewInputs(task, records, known[0])
    dataset = known if new is None else new
    near = Feed(task, known)  # models are made on the CPU, whatever they compute on
    replica = Replica(
        task,
        device=world.device,
        sample=lambda: near.batch(np.arange(min(2, len(known)))),
        start=read_start(job),
        parking=make_parking(job),
    )
    if (weighing := derived_weight(replica)) is not None:
        task = replica.task = replace(replica.task, weight=weighing.weight)
    feed, shown = Feed(task, dataset, device=world.device), Feed(task, known, device=world.device)
    return Reading(
        task=task,
        replica=replica,
        feed=feed,
        length=len(dataset),
        coming=new if given == STREAM else None,
        takes=ModelInputs(replica.module),
        example=lambda: shown.batch(np.arange(min(task.batch_size, len(known)))),
    )


def open_strategy(reading: Reading, job: Job, world: World, extent: Extent, reporter: Reporter) -> Strategy:
    """The job's strategy, with the model's values in it."""
    strategy = make_strategy(job.spec, world, job.num_slots)
    strategy.open(
        reading.replica,
        Setting(
            world=world,
            conduct=job.conduct,
            extent=extent,
            company=Company(report=reporter.line, on_idle=reporter.on_idle, meet=reporter.meet)
            if world.is_spread
            else Company(report=reporter.line),
            supply=reading,
            memory_bytes=job.cluster.memory_bytes,
        ),
    )
    reading.replica.start = Start()  # the model has its values now; nobody needs them twice
    return strategy
