"""The orders of data sets that are read forward only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.ledger.order import Order, mix

_SHARDS, _BLOCK = range(111, 113)


class PassOrder:
    """As samples come, in one pass after the other; those of a later pass have numbers of their own.

    Where they come in several `parts`, one number of each after the other, a batch is sorted by them: a slot gets
    samples of few parts, of the same ones in every batch.
    """

    def __init__(self, length: int, batch_size: int = 1, parts: int = 1) -> None:
        self.length = length
        self._batch_size = batch_size
        self._parts = parts

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        size, before = self._batch_size, epoch * self.length
        if self._parts == 1:
            return np.arange(before + start, before + stop, dtype=np.int64)
        first, last = start // size, -(-stop // size)
        batches = np.arange(first * size, last * size, dtype=np.int64).reshape(-1, size)
        order = np.argsort(batches % self._parts, axis=1, kind="stable")
        by_part = np.take_along_axis(batches, order, axis=1).ravel()
        return before + by_part[start - first * size : stop - first * size]


class StreamOrder:
    """Shards in another order each epoch; within a shard, samples are shuffled within blocks of `buffer`.

    So a reader that goes through a shard once needs to hold one block. Samples are numbered through all shards in
    the order in which they were given.
    """

    def __init__(self, lengths: Sequence[int], buffer: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = sum(lengths)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._firsts = np.cumsum(self._lengths) - self._lengths
        self._buffer = buffer
        self._seed = seed
        self._shuffle = shuffle
        self._shards = Order(len(lengths), mix(seed, _SHARDS), shuffle=shuffle)
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        shards, ends = self._plan(epoch)
        parts = [np.empty(0, dtype=np.int64)]
        number = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            shard = int(shards[number])
            offset = start - int(ends[number] - self._lengths[shard])
            count = min(stop, int(ends[number])) - start
            parts.append(self._firsts[shard] + self._within(epoch, shard, offset, offset + count))
            start, number = start + count, number + 1
        return np.concatenate(parts)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of an epoch in their order, and the position where each ends."""
        plan = self._epoch
        if plan is None or plan[0] != epoch:
            shards = self._shards.samples(epoch, 0, len(self._lengths))
            plan = self._epoch = (epoch, shards, np.cumsum(self._lengths[shards]))
        return plan[1], plan[2]

    def _within(self, epoch: int, shard: int, start: int, stop: int) -> np.ndarray:
        """The offsets in a shard that come at these positions of it."""
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        while start < stop:
            number, offset = divmod(start, self._buffer)
            first = number * self._buffer
            size = min(self._buffer, int(self._lengths[shard]) - first)
            end = min(stop - first, size)
            order = Order(size, mix(self._seed, _BLOCK, shard, number))
            parts.append(first + order.samples(epoch, offset, end))
            start = first + end
        return np.concatenate(parts)
