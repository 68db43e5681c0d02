"""Evaluation and prediction with a saved model, under any strategy: also with one that no worker can hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shoal.roles.inference.evaluator import Evaluator
from shoal.roles.inference.output import WritingOrder, open_output
from shoal.roles.inference.reading import Reading, open_strategy, read
from shoal.roles.inference.rows import rows_of
from shoal.roles.process.joining import Fellows
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, World
from shoal.spec.features import check_task
from shoal.spec.vocabulary import State
from shoal.strategies import Strategy
from shoal.strategies.base import Extent


def evaluate(job: Job, world: World, reporter: Reporter) -> None:
    """Loss and metrics of a saved model over a data set."""
    reading = read(job, world)
    check_task(reading.task, job.conduct, job.strategy)
    evaluator = Evaluator(reading.task, reading.replica, reading.length, reading.feed, job.conduct)
    extent = Extent(table_rows=evaluator.num_batches, table_columns=evaluator.num_columns)
    strategy = open_strategy(reading, job, world, extent, reporter)
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.EVALUATING, 0)
    results = evaluator.run(strategy, world)
    reporter.done({"results": results, "samples": reading.length})
    strategy.close()


def predict(job: Job, world: World, reporter: Reporter) -> None:
    """The model's outputs over a data set, written in order as they are done."""
    fellows = Fellows(world)
    # The strategy has its own segment for itself.
    order, world = WritingOrder(fellows.gather()), fellows.gather()
    reading, lanes = read(job, world), job.conduct.lanes(world.world_size)
    output = open_output(Path(job.options["out"]), reading.length)
    strategy = open_strategy(reading, job, world, Extent(table_rows=lanes, table_columns=1), reporter)
    reading.replica.module.eval()
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.PREDICTING, 0)
    rounds = PredictionRounds(reading, strategy, world.global_rank, lanes, together=job.conduct.gathers)
    reporter.total_steps = reading.num_batches
    for first in range(0, reading.num_batches, lanes):
        for number, rows in rounds.take(first).items():
            with order.of(number):
                output.append(rows, first=number == 0)
            reporter.on_progress(number + 1, int(reading.samples(number)[-1]) + 1)
    reporter.done({"samples": reading.length, "out": job.options["out"]})
    strategy.close()
    fellows.close()


class PredictionRounds:
    """Batches go round the lanes: in a round each computes one."""

    def __init__(self, reading: Reading, strategy: Strategy, rank: int, lanes: int, *, together: bool) -> None:
        """`together`: all take part in the passes of each, so that every lane makes as many as the others."""
        self._reading = reading
        self._strategy = strategy
        self._rank = rank
        self._lanes = lanes
        self._together = together

    def take(self, first: int) -> dict[int, dict[str, np.ndarray]]:
        """Compute the batches from this one on, one in each lane; by number, the outputs of those that this
        process is to write."""
        found: dict[int, dict[str, np.ndarray]] = {}

        def fill(table: torch.Tensor, lane: int) -> None:
            rows = self._infer(first + lane)
            if rows is not None:
                found[lane] = rows
                table[lane] = self._rank

        # Of those in a lane who have an output, the one whose row of the table counts writes it.
        writers = self._strategy.exchange(1 + first // self._lanes, (self._lanes, 1), fill)
        mine = [lane for lane in found if writers[lane, 0] == self._rank]
        return {first + lane: found[lane] for lane in mine if first + lane < self._reading.num_batches}

    @torch.no_grad()
    def _infer(self, number: int) -> dict[str, np.ndarray] | None:
        """The rows of a batch; None where another process has them."""
        last = self._reading.num_batches - 1
        if number > last and not self._together:
            return None
        number = min(number, last)
        result = self._strategy.infer(self._reading.replica, self._reading.inputs(number))
        return None if result is None else rows_of(result, len(self._reading.samples(number)))
