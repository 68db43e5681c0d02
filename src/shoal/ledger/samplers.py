"""Orders that are not plain permutations: drawn by weight, by class, or by the user's own rule.

All are functions of the seed and the epoch, so that every process computes the same ones and none is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.datasets import Stream
from shoal.datasets.iterated import ENDLESS, ByPosition
from shoal.datasets.stream import ForwardOnly
from shoal.errors import TaskError
from shoal.ledger.order import EpochOrder, Order, mix
from shoal.ledger.streaming import PassOrder, StreamOrder
from shoal.spec import Stratified, Task, Weighted

_DRAW, _SPREAD, _LEFT_OVER, _POSITION = range(101, 105)  # tell the random numbers of one epoch apart


def hashed(key: int, count: int, *, start: int = 0) -> np.ndarray:
    """So many 64-bit hashes of a key and the numbers from `start` on (splitmix64)."""
    numbers = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state = np.uint64(key) + numbers * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniform(key: int, count: int, *, start: int = 0) -> np.ndarray:
    """The same as numbers from 0 up to, but not including, 1."""
    return (hashed(key, count, start=start) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(key: int, count: int) -> np.ndarray:
    """A permutation of so many numbers."""
    return np.argsort(hashed(key, count), kind="stable")


class DrawnOrder:
    """With replacement: every position draws a sample by its weight, whatever the others drew."""

    def __init__(self, weights: np.ndarray, length: int, seed: int) -> None:
        self.length = length
        self._seed = seed
        self._ends = np.cumsum(weights) / weights.sum()
        self._last = int(np.flatnonzero(weights)[-1])

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        draws = uniform(mix(self._seed, epoch, _DRAW), stop - start, start=start)
        # Rounding may leave the last end a hair below 1.
        return np.minimum(np.searchsorted(self._ends, draws, side="right"), self._last)


class WholeOrder:
    """An order that is made for a whole epoch at a time, and kept until the next one begins."""

    def __init__(self, length: int, make: Callable[[int], np.ndarray]) -> None:
        self.length = length
        self._make = make
        self._made: tuple[int, np.ndarray] | None = None

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        # A prefetching thread and the loop may ask at the same time: what was found is used, not read again.
        made = self._made
        if made is None or made[0] != epoch:
            made = self._made = (epoch, self._make(epoch))
        return made[1][start:stop]


def drawn_once(weights: np.ndarray, length: int, seed: int) -> WholeOrder:
    """Without replacement: heavier samples tend to come earlier, and are in more of the short epochs."""

    def make(epoch: int) -> np.ndarray:
        draws = uniform(mix(seed, epoch, _DRAW), len(weights))
        # Efraimidis and Spirakis: the largest u ** (1 / weight) are such a draw.
        with np.errstate(divide="ignore"):
            keys = np.where(weights > 0, np.log(draws) / weights, -np.inf)
        return np.argsort(-keys, kind="stable")[:length]

    return WholeOrder(length, make)


def stratified(labels: np.ndarray, batch_size: int, seed: int) -> WholeOrder:
    """Every sample once in an epoch, and in every batch the classes in their proportions.

    Samples lie sorted by class, shuffled within each. A small last batch takes evenly spaced ones; the rest is
    dealt out like cards, so that of each class every batch gets the same number or one more.
    """
    count = len(labels)
    classes = np.unique(labels, return_inverse=True)[1]
    full, left = divmod(count, batch_size)

    def make(epoch: int) -> np.ndarray:
        spread = shuffled(mix(seed, epoch, _SPREAD), count)
        by_class = spread[np.argsort(classes[spread], kind="stable")]
        taken = np.diff(np.arange(count + 1) * left // count).astype(bool)
        dealt = np.arange(count - left) % max(full, 1)
        batch_of = np.full(count, full)
        batch_of[~taken] = shuffled(mix(seed, epoch, _LEFT_OVER), full)[dealt]
        # Within a batch in any order: a slot's part of it should not be all of one class.
        return by_class[np.lexsort((hashed(mix(seed, epoch, _POSITION), count), batch_of))]

    return WholeOrder(count, make)


def users_own(ask: Callable[[int], Any], num_samples: int, name: str) -> WholeOrder:
    """What the user's sampler says, checked: the same each time it is asked, of one length, and within the set."""

    def read(epoch: int) -> np.ndarray:
        order = np.asarray(ask(epoch))
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            raise TaskError(
                f"Task: sampler {name} must give a list of sample numbers for each epoch, found shape "
                f"{order.shape} of type {order.dtype} for epoch {epoch}."
            )
        if int(order.min()) < 0 or int(order.max()) >= num_samples:
            raise TaskError(
                f"Task: sampler {name} gives numbers from {order.min()} to {order.max()} for epoch {epoch}, "
                f"but the train set has {num_samples} samples, counted from 0."
            )
        return order.astype(np.int64)

    first = read(0)
    if not np.array_equal(first, read(0)):
        raise TaskError(
            f"Task: sampler {name} gave two different orders for epoch 0, so workers would not agree on the data; "
            "let it depend on the epoch and the seed alone."
        )

    def make(epoch: int) -> np.ndarray:
        order = read(epoch)
        if len(order) != len(first):
            raise TaskError(
                f"Task: sampler {name} gives {len(first)} samples for epoch 0 and {len(order)} for epoch {epoch}; "
                "all epochs must have the same number."
            )
        return order

    return WholeOrder(len(first), make)


def make_order(task: Task, train: Any, batch_size: int) -> EpochOrder:
    """In which order the epochs of a task take the samples of its train set."""
    sampler, seed, count = task.sampler, task.seed, len(train)
    if isinstance(train, ByPosition):
        return _order_of_passes(task, train, batch_size)
    if isinstance(sampler, (Weighted, Stratified)):
        _check_fit(sampler, train)
    if isinstance(sampler, Weighted):
        if sampler.replacement:
            return DrawnOrder(sampler.weights, sampler.num_samples or count, seed)
        return drawn_once(sampler.weights, sampler.num_samples or int((sampler.weights > 0).sum()), seed)
    if isinstance(sampler, Stratified):
        return stratified(sampler.labels, batch_size, seed)
    if sampler is not None:
        name = getattr(sampler, "__name__", type(sampler).__name__)
        ask = sampler.order if hasattr(sampler, "order") else lambda epoch: sampler(epoch, seed)
        return users_own(ask, count, name)
    if isinstance(train, Stream):
        return StreamOrder(train.lengths, train.buffer, seed, shuffle=task.shuffle)
    return Order(count, seed, shuffle=task.shuffle)


def _order_of_passes(task: Task, train: ByPosition, batch_size: int) -> PassOrder:
    if task.sampler is not None:
        raise _jumps(task.sampler)
    if train.length is not None:
        return PassOrder(train.length)
    if task.max_steps is None or task.epochs > 1:
        raise TaskError(
            f"Task: the train set has no length, so epochs={task.epochs} does not say how long to train; set "
            "max_steps= and no epochs, which goes through it again and again, or give it a __len__, as "
            "shoal.datasets.Counted(...) does."
        )
    return PassOrder(ENDLESS // batch_size * batch_size, batch_size, train.parts)


def _jumps(sampler: Any) -> TaskError:
    return TaskError(
        f"Task: sampler {type(sampler).__name__} takes samples from anywhere, but the train set is read forward "
        "only; leave sampler out, or use a data set that is read by index."
    )


def _check_fit(sampler: Weighted | Stratified, train: Any) -> None:
    name = type(sampler).__name__
    if isinstance(train, ForwardOnly):
        raise _jumps(sampler)
    if len(sampler) != len(train):
        what = "weights" if isinstance(sampler, Weighted) else "labels"
        raise TaskError(
            f"Task: sampler {name} has {len(sampler)} {what}, but the train set has {len(train)} samples; give "
            "one for each."
        )
