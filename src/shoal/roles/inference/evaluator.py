"""Evaluate on the test set, spread over the workers, with the same result for any number of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.feed.feed import Feed
from shoal.ledger.order import mix
from shoal.model.replica import Replica
from shoal.spec import Conduct, Task, World
from shoal.step.compute import split_batch, task_loss
from shoal.step.objective import inputs_of, loss_from
from shoal.strategies.base import Strategy

_TESTING = 1 << 32
"""In the place of a step: keys what is drawn while test samples are read."""


class Evaluator:
    """Batches go round the workers; their sums are added in the order of the batches."""

    def __init__(self, task: Task, replica: Replica, length: int, feed: Feed, conduct: Conduct) -> None:
        self._task = task
        self._replica = replica
        self._length = length
        self._feed = feed
        self._conduct = conduct
        self.num_batches = -(-length // task.batch_size)
        self.num_columns = 2 + len(task.metrics)
        self._serial = 0

    def run(self, strategy: Strategy, world: World) -> dict[str, float]:
        """Loss and metrics over the whole test set."""
        serial = self._serial + 1
        self._replica.module.eval()
        try:
            table = strategy.exchange(
                serial,
                (self.num_batches, self.num_columns),
                lambda table, lane: self._fill(table, lane, strategy, self._conduct.lanes(world.world_size)),
            )
        finally:
            self._replica.train_mode()
        self._serial = serial  # not where the exchange was left: it is made again
        weights = table[:, 0]
        sums = (table[:, 1:] * weights[:, None]).sum(0) / weights.sum()
        return dict(zip(("loss", *self._task.metrics), sums.tolist(), strict=True))

    @torch.no_grad()
    def _fill(self, table: torch.Tensor, lane: int, strategy: Strategy, lanes: int) -> None:
        size, last = self._task.batch_size, self.num_batches - 1
        # Where the model is cut, every lane makes the same number of passes: the last ones may be for nothing.
        stop = -(-self.num_batches // lanes) * lanes if self._conduct.gathers else self.num_batches
        for number in range(lane, stop, lanes):
            first = min(number, last) * size
            samples = np.arange(first, min(first + size, self._length))
            batch = self._feed.keyed_batch(samples, mix(self._task.seed, _TESTING, min(number, last)))
            weight = self._feed.weight(batch, samples)
            # What counts nothing (padding alone) has no mean either.
            values = self._measure(strategy, batch) if weight else [0.0] * (self.num_columns - 1)
            if values is not None and number <= last:
                table[number] = torch.tensor([weight, *values], dtype=torch.float64)

    def _measure(self, strategy: Strategy, batch: Any) -> list[float] | None:
        """Loss and metrics; None where another process has the model's output."""
        if self._task.objective is not None and self._conduct.calls_model:
            return [float(task_loss(self._replica, batch))]
        with self._replica.precision.autocast():
            output = strategy.infer(self._replica, inputs_of(self._task, batch))
            if output is None:
                return None
            if self._task.loss is None:
                return [float(loss_from(self._task, output, batch))]
            _, target = split_batch(batch)
            loss = float(self._task.loss(output, target))
        output = self._replica.precision.widened(output)  # metrics may not know half precision
        return [loss, *(float(m(output, target)) for m in self._task.metrics.values())]
