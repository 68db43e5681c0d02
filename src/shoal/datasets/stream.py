"""`Stream`: a data set of shards that are read from beginning to end, never by index."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from threading import Lock
from typing import Any

from shoal.errors import SpecError, TaskError
from shoal.spec.checks import require_count

DEFAULT_BUFFER = 1024
_BLOCKS_HELD = 2
_END = object()


class ForwardOnly:
    """A data set whose samples come one after the other: numbers that jump cost much, those that go back more."""


class Stream(ForwardOnly):
    """Shards with a declared length each, which are read forward only.

    An epoch takes the shards in a shuffled order, and within each the samples, shuffled within blocks of `buffer`.
    A process holds two blocks at most. Every process reads every shard and keeps what is its own, so let
    `open_shard` yield samples as cheaply as it can, and decode them in the task's `collate`.

    Args:
        shards: What `open_shard` takes: file names, numbers, addresses.
        open_shard: Opens a shard: gives its samples one after the other, the same ones each time.
        lengths: How many samples each shard has.
        buffer: How many samples are shuffled together.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open_shard: Callable[[Any], Iterable[Any]],
        lengths: Sequence[int],
        *,
        buffer: int = DEFAULT_BUFFER,
    ) -> None:
        require_count("Stream", "buffer", buffer)
        if len(shards) != len(lengths):
            raise SpecError(f"Stream: {len(shards)} shards have {len(lengths)} lengths; give one for each.")
        for shard, length in zip(shards, lengths, strict=True):
            require_count("Stream", f"the length of shard {shard!r}", length)
        self.lengths = tuple(lengths)
        self.buffer = buffer
        self._shards = tuple(shards)
        self._open = open_shard
        self._firsts = [0, *accumulate(lengths)]
        self._reader: _ShardReader | None = None
        self._blocks: dict[tuple[int, int], list[Any]] = {}
        self._reader_pid = os.getpid()
        self._one_at_a_time = Lock()

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """These samples; quick where they come in the order of an epoch, as each jump back opens a shard anew."""
        with self._one_at_a_time:
            if self._reader_pid != os.getpid():  # what a parent had opened is read from a common position
                self._reader_pid, self._reader = os.getpid(), None
            return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"a sample's index must lie within {len(self)} samples, found {index}.")
        shard = bisect_right(self._firsts, index) - 1
        number, offset = divmod(index - self._firsts[shard], self.buffer)
        return self._block(shard, number)[offset]

    def _block(self, shard: int, number: int) -> list[Any]:
        if (shard, number) not in self._blocks:
            while len(self._blocks) >= _BLOCKS_HELD:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[shard, number] = self._read_block(shard, number)
        return self._blocks[shard, number]

    def _read_block(self, shard: int, number: int) -> list[Any]:
        reader, start = self._reader, number * self.buffer
        if reader is None or reader.shard != shard or reader.taken > start:
            name = self._shards[shard]
            reader = self._reader = _ShardReader(shard, name, self._open(name), self.lengths[shard])
        reader.skip(start - reader.taken)
        return reader.take(min(self.buffer, self.lengths[shard] - start))


class _ShardReader:
    """Goes through one shard, and holds it to its declared length."""

    def __init__(self, shard: int, name: Any, samples: Iterable[Any], length: int) -> None:
        self.shard = shard
        self.taken = 0
        """Samples that lie behind."""
        self._name = name
        self._samples: Iterator[Any] = iter(samples)
        self._length = length

    def skip(self, count: int) -> None:
        """Pass over so many samples."""
        for _ in islice(self._samples, count):
            self.taken += 1
            count -= 1
        if count:
            raise self._wrong_length(f"only {self.taken}")

    def take(self, count: int) -> list[Any]:
        """The next so many samples."""
        found = list(islice(self._samples, count))
        self.taken += len(found)
        if len(found) < count:
            raise self._wrong_length(f"only {self.taken}")
        if self.taken == self._length and next(self._samples, _END) is not _END:
            raise self._wrong_length(f"{self.taken + 1} or more")
        return found

    def _wrong_length(self, found: str) -> TaskError:
        return TaskError(
            f"Stream: shard {self._name!r} was declared with {self._length} samples, but it yields {found}; "
            "correct its length."
        )
