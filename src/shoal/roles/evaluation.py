"""Evaluate on the test set, spread over the workers, with the same result for any number of them."""

from __future__ import annotations

import numpy as np
import torch

from shoal.roles.feed import Feed
from shoal.spec import Task, World
from shoal.strategies.base import Strategy
from shoal.strategies.gradients import task_loss
from shoal.strategies.replica import Replica, call_model


class Evaluator:
    """Batches go round the workers; their sums are added in the order of the batches."""

    def __init__(self, task: Task, replica: Replica, length: int, feed: Feed) -> None:
        self._task = task
        self._replica = replica
        self._length = length
        self._feed = feed
        self.num_batches = -(-length // task.batch_size)
        self.num_columns = 2 + len(task.metrics)

    def run(self, serial: int, strategy: Strategy, world: World) -> dict[str, float]:
        """Loss and metrics over the whole test set; `serial` rises with every evaluation of a run."""
        strategy.settle()
        self._replica.module.eval()
        try:
            mine = range(world.global_rank, self.num_batches, world.world_size)
            table = strategy.exchange(serial, (self.num_batches, self.num_columns), lambda t: self._fill(t, mine))
        finally:
            self._replica.train_mode()
        weights = table[:, 0]
        sums = (table[:, 1:] * weights[:, None]).sum(0) / weights.sum()
        return dict(zip(("loss", *self._task.metrics), sums.tolist(), strict=True))

    @torch.no_grad()
    def _fill(self, table: torch.Tensor, batches: range) -> None:
        size = self._task.batch_size
        for number in batches:
            samples = np.arange(number * size, min((number + 1) * size, self._length))
            batch = self._feed.batch(samples)
            table[number] = torch.tensor([self._feed.weight(batch, samples), *self._measure(batch)]).double()

    def _measure(self, batch: tuple[object, object]) -> list[float]:
        if self._task.objective is not None:
            return [float(task_loss(self._replica, batch))]
        inputs, target = batch
        output = call_model(self._replica.module, inputs)
        assert self._task.loss is not None
        return [
            float(self._task.loss(output, target)),
            *(float(m(output, target)) for m in self._task.metrics.values()),
        ]
