"""How the steps of a run map to epochs, and how a global batch is cut into slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from shoal.errors import SpecError
from shoal.ledger.order import EpochOrder
from shoal.ledger.shares import Sizes, even_sizes, scaled_sizes


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

    has_one_size: ClassVar[bool] = True
    """Whether all batches but an epoch's last are of the same size."""

    length: int
    """Positions of an epoch: how many samples it draws, which may be more or fewer than there are."""
    batch_size: int
    slots: int
    epochs: int
    max_steps: int | None
    order: EpochOrder

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

    def count(self, step: int) -> int:
        """Samples of this step's batch."""
        return min(self.batch_size, self.length - self._start(step))

    def sizes(self, step: int, sizes: Sequence[int] | None = None) -> Sizes:
        """Samples of each slot in this step: even, or as given; a smaller batch is cut in the same proportions."""
        return cut_sizes(self.count(step), self.slots, sizes)

    def cuts(self, step: int, slots: Iterable[int], sizes: Sequence[int] | None = None) -> Iterator[Cut]:
        """The parts of this step's batch that these slots hold, cut evenly or to these sizes."""
        start, count = self._start(step), self.count(step)
        samples = self.order.samples(self.epoch_of(step), start, start + count)
        ends = [0, *accumulate(self.sizes(step, sizes))]
        for slot in slots:
            yield Cut(slot, samples[ends[slot] : ends[slot + 1]], count)

    def _start(self, step: int) -> int:
        """The position in its epoch where a step begins."""
        return (step - 1) % self.steps_per_epoch * self.batch_size


def cut_sizes(count: int, slots: int, sizes: Sequence[int] | None) -> Sizes:
    """So many samples in slots: even, or as given; where these add up to another number, in their proportions."""
    if sizes is None:
        return even_sizes(count, slots)
    if len(sizes) != slots or min(sizes) < 0 or sum(sizes) == 0:
        raise SpecError(f"A batch has {slots} slots, but the sizes of its parts are {list(sizes)}.")
    return tuple(sizes) if sum(sizes) == count else scaled_sizes(count, sizes)
