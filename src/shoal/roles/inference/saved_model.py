"""Evaluation of a saved model, under any strategy: also of one that no worker can hold."""

from __future__ import annotations

from shoal.roles.inference.evaluator import Evaluator
from shoal.roles.inference.reading import open_strategy, read
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, World
from shoal.spec.features import check_task
from shoal.spec.vocabulary import State
from shoal.strategies.base import Extent


def evaluate(job: Job, world: World, reporter: Reporter) -> None:
    """Loss and metrics of a saved model over a data set."""
    reading = read(job, world)
    check_task(reading.task, job.conduct, job.strategy)
    evaluator = Evaluator(reading.task, reading.replica, reading.length, reading.feed, job.conduct)
    evaluator.meet = reporter.meet
    extent = Extent(table_rows=evaluator.most_batches, table_columns=evaluator.tables.columns)
    strategy = open_strategy(reading, job, world, extent, reporter)
    reporter.on_state(State.READY, 0)
    reporter.on_state(State.EVALUATING, 0)
    results = evaluator.run(strategy, world)
    reporter.done({"results": results, "samples": reading.length})
    strategy.close()
