"""Evaluation and prediction with a saved model, spread over workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.arena import Segment, counter_bytes
from shoal.checkpoint import load_model
from shoal.errors import SpecError
from shoal.feed.feed import Feed
from shoal.feed.shipping import open_dataset
from shoal.roles.evaluation import Evaluator
from shoal.roles.loading import load_task
from shoal.roles.output import open_output
from shoal.roles.reporter import Reporter
from shoal.spec import Job, Task, World
from shoal.spec.vocabulary import State
from shoal.strategies import make_strategy
from shoal.strategies.base import Extent, Setting
from shoal.strategies.replica import Replica, call_model


def evaluate(job: Job, world: World, reporter: Reporter) -> None:
    """Loss and metrics of a saved model over a data set."""
    task, replica, dataset = _load(job, world)
    evaluator = Evaluator(task, replica, len(dataset), Feed(task, dataset, device=world.device), job.conduct)
    strategy = make_strategy(job.spec, world, world.world_size)
    extent = Extent(table_rows=evaluator.num_batches, table_columns=evaluator.num_columns)
    strategy.open(replica, Setting(world=world, conduct=job.conduct, extent=extent))
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.EVALUATING, 0)
    results = evaluator.run(strategy, world)
    reporter.done({"results": results, "samples": len(dataset)})
    strategy.close()


def predict(job: Job, world: World, reporter: Reporter) -> None:
    """The model's outputs over a data set, written in order as they are done.

    Batches go round the workers; one counter says whose turn it is to write.
    """
    task, replica, dataset = _load(job, world)
    feed = Feed(task, dataset, device=world.device)
    replica.module.eval()
    segment = Segment(world.arena_fd)
    segment.reserve("counters", counter_bytes(1))
    segment.map()
    written = segment.counters("counters")
    output = open_output(Path(job.options["out"]), len(dataset))
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.PREDICTING, 0)
    size = task.batch_size
    num_batches = -(-len(dataset) // size)
    reporter.total_steps = num_batches
    for number in range(world.global_rank, num_batches, world.world_size):
        samples = np.arange(number * size, min((number + 1) * size, len(dataset)))
        with torch.no_grad():
            result = call_model(replica.module, feed.batch(samples)[0])
        if not isinstance(result, torch.Tensor) or result.shape[:1] != (len(samples),):
            found = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise SpecError(
                f"predict writes one row per sample, but for {len(samples)} samples the model returned {found}; "
                "let the model return its main output alone when not training."
            )
        if result.dim() == 0 or len(result) != len(samples):
            raise SpecError(
                f"predict writes one row per sample, but for {len(samples)} samples the model returned shape "
                f"{tuple(result.shape)}; let it keep the batch as its first dimension."
            )
        written.wait(0, number)
        output.append(result.cpu(), first=number == 0)
        written.publish(0, number + 1)
        reporter.on_progress(number + 1, int(samples[-1]) + 1)
    reporter.done({"samples": len(dataset), "out": job.options["out"]})
    segment.close()


def _load(job: Job, world: World) -> tuple[Task, Replica, Any]:
    task = load_task(job)
    part = job.options.get("data", "test")
    if part not in ("train", "test"):
        raise SpecError(f"The data must be train or test, found {part!r}.")
    if getattr(task, part) is None:
        raise SpecError(f"{job.target} has no {part} set; choose the other with --data, or give the task one.")
    dataset = open_dataset(task, part, lambda: world)
    replica = Replica(task, device=world.device, sample=lambda: Feed(task, dataset).batch(np.arange(1)))
    load_model(Path(job.options["model"]), replica.module)
    return task, replica, dataset
