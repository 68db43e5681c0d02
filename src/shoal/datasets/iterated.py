"""Data that can only be gone through, such as torch's `IterableDataset`, numbered by position."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from shoal.datasets.drawing import OwnGenerators
from shoal.datasets.stream import ForwardOnly
from shoal.errors import TaskError

ENDLESS = 1 << 40
"""So many numbers has a set of unknown length: more than anybody will take."""
_END = object()


@dataclass
class _Pass:
    """One way through the source, as far as it has come."""

    number: int
    start: int
    """The number of its first sample."""
    samples: Iterator[Any]
    generators: OwnGenerators
    next: int
    """The number of the sample that comes next."""
    skipped_to: int
    """The number of the first sample that was not skipped."""

    @property
    def may_have_ended_before(self) -> bool:
        """Whether nothing has come since samples were skipped: perhaps there were fewer than that."""
        return self.start < self.skipped_to == self.next


class ByPosition(ForwardOnly, ABC):
    """Samples that are numbered by position, because they have no other name."""

    length: int | None
    """Samples of a pass; None: nobody knows."""
    parts: int = 1
    """In so many it is gone through; those of a batch come part by part."""

    def __len__(self) -> int:
        return ENDLESS if self.length is None else self.length

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    @abstractmethod
    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples."""


class Iterated(ByPosition):
    """Sample `n` is the n-th that comes, in one pass through the source after the other.

    With a length, every pass must keep to it; without one, a pass begins where the one before has ended. Every
    process goes through all of it, and keeps what is its own. What the source draws from Python's, numpy's and
    torch's generators follows from the seed and the pass, so that all processes meet the same samples. One that
    comes late, or goes back, lets the source `skip(n)` where it can; else it reads the pass from its beginning.

    Args:
        source: Begins anew whenever it is iterated; told `set_epoch(pass)` before, where it has that.
        seed: Of what it draws.
        keep: So many of the last samples stay at hand for who goes back a little.
    """

    def __init__(self, source: Any, *, seed: int, keep: int) -> None:
        self.length = _length_of(source)
        self._source = source
        self._seed = seed
        self._keep = keep
        self._kept: dict[int, Any] = {}
        self._starts = [0]
        """Of unknown length: where each pass begins, as far as they are known."""
        self._pass: _Pass | None = None
        self._reader_pid = os.getpid()
        self._one_at_a_time = Lock()

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples; quick where they come in rising order."""
        with self._one_at_a_time:
            self._begin_anew_after_a_fork()
            missing = [number for number in numbers if number not in self._kept]
            if missing:
                self._read(min(missing), max(missing))
            found = [self._kept[number] for number in numbers]
            self._forget_old()
            return found

    def _forget_old(self) -> None:
        reached = 0 if self._pass is None else self._pass.next
        recent = range(reached - self._keep, reached)
        self._kept = {number: sample for number, sample in self._kept.items() if number in recent}

    def _begin_anew_after_a_fork(self) -> None:
        """What the parent process had opened is its own: files would be read from a common position."""
        if self._reader_pid != os.getpid():
            self._reader_pid, self._pass = os.getpid(), None
            self._kept.clear()

    def _read(self, first: int, last: int) -> None:
        """Keep all samples from the first to the last."""
        current, self._pass = self._pass, None  # a source that raises is opened anew for whoever asks again
        if current is None or not self._leads_to(first, current):
            current = self._opened_for(first)
        floor = min(first, last - self._keep)
        while current.next <= last:
            with current.generators.in_use():
                self._go_on(current, floor, last)
            if current.next <= last:
                current = self._following(current)
        self._pass = current

    def _leads_to(self, number: int, current: _Pass) -> bool:
        return current.next <= number and (self.length is None or number < current.start + self.length)

    def _go_on(self, current: _Pass, floor: int, last: int) -> None:
        """Read up to the last, or to the end of the pass."""
        end = None if self.length is None else current.start + self.length
        while current.next <= last and current.next != end:
            sample = next(current.samples, _END)
            if sample is _END:
                if end is not None:
                    raise self._wrong_length(f"only {current.next - current.start}")
                return
            if current.next >= floor:
                self._kept[current.next] = sample
            current.next += 1
        if end is not None and current.next == end and next(current.samples, _END) is not _END:
            raise self._wrong_length(f"{end - current.start + 1} or more")

    def _opened_for(self, number: int) -> _Pass:
        """The pass in which this number lies, as far as is known, at the number where the source can skip."""
        if self.length is not None:
            which, offset = divmod(number, self.length)
            return self._open(which, number - offset, offset)
        which = bisect_right(self._starts, number) - 1
        return self._open(which, self._starts[which], number - self._starts[which])

    def _following(self, current: _Pass) -> _Pass:
        """The pass after one that has ended; or the same one from its beginning, to see where it ends."""
        if current.may_have_ended_before:
            return self._open(current.number, current.start, 0)
        if current.next == current.start:
            raise TaskError(
                f"Task: a data set ({type(self._source).__name__}) yields no samples; let its __iter__ begin anew "
                "each time it is called."
            )
        if current.number + 1 == len(self._starts):
            self._starts.append(current.next)
        return self._open(current.number + 1, current.next, 0)

    def _open(self, which: int, start: int, offset: int) -> _Pass:
        generators = OwnGenerators((self._seed * 1_000_003 + which) % (1 << 63))
        skips = bool(offset) and hasattr(self._source, "skip")
        with generators.in_use():
            self._tell_pass(self._source, which)
            rest = self._source.skip(offset) if skips else self._source
            self._tell_pass(rest, which)
            samples = iter(rest)
        reached = start + offset if skips else start
        return _Pass(which, start, samples, generators, reached, reached)

    @staticmethod
    def _tell_pass(source: Any, which: int) -> None:
        if hasattr(source, "set_epoch"):
            source.set_epoch(which)

    def _wrong_length(self, found: str) -> TaskError:
        return TaskError(
            f"Task: a data set ({type(self._source).__name__}) has a length of {self.length}, but a pass through "
            f"it yields {found}; correct its __len__."
        )


def _length_of(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
