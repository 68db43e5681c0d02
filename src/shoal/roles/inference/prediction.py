"""Prediction: what a saved model says about each sample, under any strategy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from shoal.model.replica import Replica
from shoal.roles.inference.batches import Batches, ComingBatches, InputBatch, KnownBatches
from shoal.roles.inference.desk_link import DeskLink
from shoal.roles.inference.reading import open_strategy, read
from shoal.roles.inference.rows import rows_of
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, World
from shoal.spec.vocabulary import State
from shoal.strategies import Strategy
from shoal.strategies.base import Extent


def predict(job: Job, world: World, reporter: Reporter) -> None:
    """Bring the model's outputs to the desk, batch by batch, from the first on whose rows are not there yet."""
    link, first = DeskLink(job.options), job.options["first"]
    reading, lanes = read(job, world), job.conduct.lanes(world.world_size)
    strategy = open_strategy(reading, job, world, Extent(table_rows=lanes, table_columns=1), reporter)
    reading.replica.module.eval()
    coming = reading.coming
    batches: Batches = KnownBatches(reading) if coming is None else ComingBatches(reading, coming, link)
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.PREDICTING, 0)
    reporter.total_steps = batches.total
    if job.conduct.gathers:
        made = predicted_together(batches, strategy, reading.replica, first, lanes, world.global_rank)
    else:
        made = predicted_apart(batches, strategy, reading.replica, first + world.global_rank, lanes)
    num_samples = 0
    for number, batch, rows in made:
        link.bring(number, rows)
        num_samples = batch.end
        reporter.on_progress(number + 1, num_samples)
    reporter.done({"samples": num_samples})
    strategy.close()
    link.close()


class Predicted(NamedTuple):
    """A batch that this process is to bring."""

    number: int
    batch: InputBatch
    rows: dict[str, np.ndarray]


def predicted_apart(
    batches: Batches, strategy: Strategy, replica: Replica, first: int, lanes: int
) -> Iterator[Predicted]:
    """Where each worker has the whole model: this one takes every so many-th batch, and waits for nobody."""
    number = first
    while (batch := batches.take(number)) is not None:
        if batch.count:  # else an attempt before this one has brought its rows
            with torch.no_grad():
                result = strategy.infer(replica, batch.inputs)
            yield Predicted(number, batch, rows_of(result, batch.count))
        number += lanes
    # All leave together: some strategies would miss one that is gone.
    strategy.exchange(1, (lanes, 1), lambda table, lane: None)


def predicted_together(
    batches: Batches, strategy: Strategy, replica: Replica, first: int, lanes: int, rank: int
) -> Iterator[Predicted]:
    """Where all take part in each pass: in a round every lane computes one batch, and all know what came of it."""
    serial, start = 1, first
    while (head := batches.take(start)) is not None:
        if not head.count:
            start += 1  # an attempt before this one had nothing for one of its lanes
            continue
        found: dict[int, Predicted] = {}
        fill = partial(_fill, strategy, replica, LaneBatches(batches, start, head), found, rank)
        # Of those in a lane who have an output, the one whose row of the table counts brings it.
        writers = strategy.exchange(serial, (lanes, 1), fill)
        yield from (one for lane, one in found.items() if writers[lane, 0] == rank)
        serial, start = serial + 1, start + lanes


class LaneBatches:
    """The batches of one round. A lane for which there is none computes the first one for nothing."""

    def __init__(self, batches: Batches, start: int, head: InputBatch) -> None:
        self._batches = batches
        self._start = start
        self._head = head

    def of(self, lane: int) -> tuple[int, InputBatch, bool]:
        """A lane's batch with its number, and whether anybody wants its rows."""
        own = self._head if lane == 0 else self._batches.take(self._start + lane, waits=False)
        if own is None or not own.count:
            return self._start, self._head, False
        return self._start + lane, own, True


@torch.no_grad()
def _fill(
    strategy: Strategy,
    replica: Replica,
    batches: LaneBatches,
    found: dict[int, Predicted],
    rank: int,
    table: torch.Tensor,
    lane: int,
) -> None:
    """Compute a lane's batch; the table says who has its output."""
    number, batch, is_wanted = batches.of(lane)
    result = strategy.infer(replica, batch.inputs)
    if result is None:
        return
    table[lane] = rank
    if is_wanted:
        found[lane] = Predicted(number, batch, rows_of(result, batch.count))
