"""Batches of samples that each come in by their own chance: what accountants of privacy count on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np

from shoal.ledger.cuts import Cut, Schedule

_SIZES, _MEMBERS = 121, 122  # tell the random numbers of one run apart


class PoissonOrder:
    """In every step each of `length` samples is there with the same chance, whatever the others are.

    How many come is drawn first (binomial), then which (all sets of that size alike): together that is the same as
    a draw for each. All of it follows from the key, so that every process finds the same.
    """

    def __init__(self, length: int, batch_size: int, key: int) -> None:
        self.length = length
        self._steps = -(-length // batch_size)
        self._rate, self._key = min(1.0, batch_size / length), key
        self._sizes = lru_cache(maxsize=4)(self._draw_sizes)

    def _draw_sizes(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._key, _SIZES, epoch]).binomial(self.length, self._rate, self._steps)

    def count(self, step: int) -> int:
        """Samples of a step."""
        epoch, within = divmod(step - 1, self._steps)
        return int(self._sizes(epoch)[within])

    def count_until(self, epoch: int, steps: int) -> int:
        """Samples of the first so many steps of an epoch."""
        return int(self._sizes(epoch)[:steps].sum())

    def batch(self, step: int) -> np.ndarray:
        """The samples of a step."""
        chance = np.random.default_rng([self._key, _MEMBERS, step])
        return chance.choice(self.length, self.count(step), replace=False).astype(np.int64)

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Samples at positions of an epoch, one step's behind the other's."""
        found, at, end = [np.empty(0, dtype=np.int64)], 0, 0
        for step in range(epoch * self._steps + 1, (epoch + 1) * self._steps + 1):
            if end >= stop:
                break
            at, end = end, end + self.count(step)
            if start < end and at < stop:
                found.append(self.batch(step)[max(0, start - at) : stop - at])
        return np.concatenate(found)


@dataclass(frozen=True)
class PoissonSchedule(Schedule):
    """Steps whose batches have `batch_size` samples in the mean; an epoch has as many steps as it would have
    otherwise."""

    has_one_size: ClassVar[bool] = False
    order: PoissonOrder

    @property
    def smallest_batch(self) -> int:
        return 0

    def count(self, step: int) -> int:
        return self.order.count(step)

    def samples_after(self, step: int) -> int:
        epochs, rest = divmod(step, self.steps_per_epoch)
        whole = self._after_epochs(epochs)
        return whole + (self.order.count_until(epochs, rest) if rest else 0)

    def _after_epochs(self, epochs: int) -> int:
        while len(self._ends) <= epochs:
            last = len(self._ends) - 1
            self._ends.append(self._ends[-1] + self.order.count_until(last, self.steps_per_epoch))
        return self._ends[epochs]

    @cached_property
    def _ends(self) -> list[int]:
        """By epoch: samples of all before it."""
        return [0]

    def cuts(self, step: int, slots: Iterable[int], sizes: Sequence[int] | None = None) -> Iterator[Cut]:
        samples = self.order.batch(step)
        ends = [0, *accumulate(self.sizes(step, sizes))]
        for slot in slots:
            # A sample counts the same in every step: the size of a batch tells nothing of who was in it.
            yield Cut(slot, samples[ends[slot] : ends[slot + 1]], self.batch_size)
