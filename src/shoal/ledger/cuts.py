"""How the steps of a run map to epochs, and how a global batch is cut into slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.ledger.order import Order


@dataclass(frozen=True)
class Cut:
    """One slot's part of a global batch."""

    slot: int
    samples: np.ndarray
    batch_samples: int
    """Samples of the whole global batch: what this part's mean is weighted against."""

    def alone(self) -> Cut:
        """The same part as a batch of its own."""
        return Cut(self.slot, self.samples, len(self.samples))


@dataclass(frozen=True)
class Schedule:
    """All steps of a run. Steps count from 1; the last batch of an epoch may be smaller."""

    length: int
    batch_size: int
    slots: int
    epochs: int
    max_steps: int | None
    order: Order

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest batch: an epoch's last, where a run comes that far."""
        if self.total_steps < self.steps_per_epoch:
            return self.batch_size
        return self.length % self.batch_size or self.batch_size

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return (step - 1) // self.steps_per_epoch

    def samples_after(self, step: int) -> int:
        """Samples trained on once this step is committed."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.length + min(rest * self.batch_size, self.length)

    def cuts(self, step: int, slots: range) -> Iterator[Cut]:
        """The parts of this step's batch that these slots hold."""
        start = (step - 1) % self.steps_per_epoch * self.batch_size
        count = min(self.batch_size, self.length - start)
        samples = self.order.samples(self.epoch_of(step), start, start + count)
        for slot in slots:
            first, last = count * slot // self.slots, count * (slot + 1) // self.slots
            yield Cut(slot, samples[first:last], count)
