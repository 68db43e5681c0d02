"""Data that is gone through in parts, so that no process has to read all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from shoal.datasets.in_parts import InParts
from shoal.datasets.iterated import ByPosition, Iterated

_END = object()


class Parted(ByPosition):
    """Sample `n` is the one at position `n // parts` of part `n % parts`.

    Each part goes on by itself: where it ends, it begins anew. A process opens those that it is asked for.
    """

    def __init__(self, given: InParts, *, seed: int, keep: int) -> None:
        self.length = None
        self.parts = given.count
        self._parts = [
            Iterated(PartOf(given, index), seed=seed * self.parts + index, keep=keep // self.parts + 1)
            for index in range(self.parts)
        ]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples; quick where those of each part come in rising order."""
        found: dict[int, Any] = {}
        for index, part in enumerate(self._parts):
            if wanted := [number for number in numbers if number % self.parts == index]:
                found.update(zip(wanted, part.__getitems__([n // self.parts for n in wanted]), strict=True))
        return [found[number] for number in numbers]


class PartOf:
    """One part, as torch's loaders ask for it: by `get_worker_info()`, or by `shard` where the source has it."""

    def __init__(self, given: InParts, index: int) -> None:
        self._index = index
        self._count = given.count
        self._source = copy(given.source)  # each may be in another pass
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which pass comes next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        by_shard = hasattr(self._source, "shard")
        source = self._source.shard(num_shards=self._count, index=self._index) if by_shard else self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._epoch)
        return iter(source) if by_shard else self._read_as_loader(source)

    def _read_as_loader(self, source: Any) -> Iterator[Any]:
        samples: Iterator[Any] | None = None
        while True:
            with self._as_loader():  # a generator asks who reads it when it is first read
                samples = iter(source) if samples is None else samples
                sample = next(samples, _END)
            if sample is _END:
                return
            yield sample

    @contextmanager
    def _as_loader(self) -> Iterator[None]:
        outside = torch_worker._worker_info
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._index, num_workers=self._count, seed=0, dataset=self._source
        )
        try:
            yield
        finally:
            torch_worker._worker_info = outside
