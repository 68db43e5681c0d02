"""`Book`: what each slot of each committed step has used, and the audit that compares it with the schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shoal.errors import ProtocolError
from shoal.ledger.cuts import Schedule, cut_sizes
from shoal.ledger.shares import Sizes

Span = tuple[int, int]
"""Positions that were used, from the first to the one after the last. They count through all epochs."""


@dataclass(frozen=True)
class BookRow:
    """Steps in which every slot used the same number of samples."""

    first: int
    last: int
    counts: Sizes


class CutLog:
    """From which step on the slots had which sizes; None: even ones, as at the start."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Sizes | None]] = []

    def note(self, from_step: int, sizes: Sequence[int] | None) -> None:
        """From this step on batches are cut to these sizes; what was noted for it and later steps is void."""
        while self._changes and self._changes[-1][0] >= from_step:
            self._changes.pop()
        cut = None if sizes is None else tuple(sizes)
        if cut != (self._changes[-1][1] if self._changes else None):
            self._changes.append((from_step, cut))

    def at(self, step: int) -> Sizes | None:
        """The sizes of a step."""
        count = bisect_right(self._changes, step, key=lambda change: change[0])
        return self._changes[count - 1][1] if count else None

    def changes(self, first: int, last: int) -> Iterator[int]:
        """The steps from the first to the last from which on batches were cut otherwise than before."""
        return (step for step, _ in self._changes if first <= step <= last)

    def __len__(self) -> int:
        return len(self._changes)

    def plain(self) -> list[Any]:
        """Plain data that `from_plain` reads."""
        return [[from_step, None if sizes is None else list(sizes)] for from_step, sizes in self._changes]

    @classmethod
    def from_plain(cls, plain: Any) -> CutLog:
        """The log that `plain` wrote; `ProtocolError` for anything else."""
        log = cls()
        for change in plain if isinstance(plain, list) else [plain]:
            match change:
                case [int(from_step), None]:
                    log.note(from_step, None)
                case [int(from_step), [*sizes]] if sizes and all(type(size) is int for size in sizes):
                    log.note(from_step, sizes)
                case _:
                    raise ProtocolError("What should be a log of cuts is not [[step, [size, …]], …].")
        return log


class Book:
    """The samples that the slots of committed steps have used, in a few rows however many steps there are."""

    def __init__(self, since: int = 0) -> None:
        self.since = since
        """Steps up to this one were committed by a run that kept no book."""
        self.rows: list[BookRow] = []
        self.cuts = CutLog()
        """How the batches were cut that were not cut evenly."""

    def commit(self, step: int, counts: Sequence[int], sizes: Sizes | None = None) -> None:
        """A step is committed: its slots used so many samples of parts of these sizes."""
        self._append(BookRow(step, step, tuple(counts)))
        self.cuts.note(step, sizes)

    def commit_past(self, first: int, counts: np.ndarray, sizes: np.ndarray | None) -> None:
        """Steps from `first` on were committed before this process came; by step and slot.

        Sizes that are all zero stand for even ones.
        """
        for begin, end in _runs(counts):
            self._append(BookRow(first + begin, first + end - 1, tuple(counts[begin].tolist())))
        if sizes is not None:
            for begin, _ in _runs(sizes):
                self.cuts.note(first + begin, sizes[begin].tolist() if sizes[begin].any() else None)

    def commit_whole(self, schedule: Schedule, last: int) -> None:
        """All steps up to `last` are committed, and every slot used all of its part."""
        step = self.rows[-1].last + 1 if self.rows else self.since + 1
        while step <= last:
            epoch_end = (schedule.epoch_of(step) + 1) * schedule.steps_per_epoch
            # Only the last batch of an epoch may be smaller.
            stretch_end = step if step == epoch_end else min(last, epoch_end - 1)
            self._append(BookRow(step, stretch_end, schedule.sizes(step)))
            self.cuts.note(step, None)
            step = stretch_end + 1

    def _append(self, row: BookRow) -> None:
        before = self.rows[-1] if self.rows else None
        if before is not None and before.last + 1 == row.first and before.counts == row.counts:
            self.rows[-1] = BookRow(before.first, row.last, row.counts)
        else:
            self.rows.append(row)

    def plain(self) -> dict[str, Any]:
        """Plain data that `from_plain` reads."""
        rows = [[row.first, row.last, list(row.counts)] for row in self.rows]
        return {"since": self.since, "rows": rows, "cuts": self.cuts.plain()}

    @classmethod
    def from_plain(cls, plain: Any) -> Book:
        """The book that `plain` wrote; `ProtocolError` for anything else."""
        match plain:
            case {"since": int(since), "rows": list(rows), "cuts": cuts} if all(map(_is_row, rows)):
                book = cls(since)
                book.rows = [BookRow(first, last, tuple(counts)) for first, last, counts in rows]
                book.cuts = CutLog.from_plain(cuts)
                return book
        raise ProtocolError("What should be a book of committed steps has no rows [first, last, [count, …]].")


def audit(book: Book, schedule: Schedule, last_step: int) -> dict[str, Any]:
    """What became of the samples of all steps up to the last, by their position in the order of the epochs.

    What was used beyond them counts as used more than once.
    """
    begin, end = schedule.samples_after(book.since), schedule.samples_after(last_step)
    once = more_than_once = never = 0
    for length, times, is_expected in _segments(_spans(book, schedule), begin, end):
        once += length * (is_expected and times == 1)
        more_than_once += length * (times > is_expected)
        never += length * (times < is_expected)
    return {
        "samples": end - begin,
        "once": once,
        "more_than_once": more_than_once,
        "never": never,
        "clean": never == more_than_once == 0,
    }


def _segments(spans: Iterator[Span], begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """All positions in pieces: how long each is, how often it was used, whether it should have been."""
    edges = Counter[int]({begin: 0, end: 0})
    for start, stop in spans:
        edges[start] += 1
        edges[stop] -= 1
    times, before = 0, begin
    for position in sorted(edges):
        yield position - before, times, begin <= before < end
        times, before = times + edges[position], position


def _spans(book: Book, schedule: Schedule) -> Iterator[Span]:
    """The positions that were used. Steps that used exactly their batches make one span."""
    expected = cache(cut_sizes)
    for row in book.rows:
        for first, last in _alike(row, book.cuts, schedule):
            sizes = expected(schedule.count(first), len(row.counts), book.cuts.at(first))
            if row.counts == sizes:
                yield schedule.samples_after(first - 1), schedule.samples_after(last)
                continue
            for step in range(first, last + 1):
                start = schedule.samples_after(step - 1)
                for offset, used in zip(accumulate(sizes, initial=0), row.counts, strict=False):
                    yield start + offset, start + offset + used


def _alike(row: BookRow, cuts: CutLog, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The first and last steps of stretches of a row whose batches have one size and were cut alike."""
    bounds = {row.first, row.last + 1, *cuts.changes(row.first, row.last)}
    if not schedule.has_one_size:
        bounds |= set(range(row.first, row.last + 1))
    if schedule.length % schedule.batch_size:
        ends = range(-(-row.first // schedule.steps_per_epoch), row.last // schedule.steps_per_epoch + 1)
        for end in (epoch * schedule.steps_per_epoch for epoch in ends):
            bounds |= {end, end + 1}
    return ((begin, end - 1) for begin, end in pairwise(sorted(bounds)))


def _runs(table: np.ndarray) -> Iterator[tuple[int, int]]:
    """From where to where (exclusive) the rows of a table are equal."""
    changes = np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1
    bounds = [0, *changes.tolist(), len(table)]
    return ((begin, end) for begin, end in pairwise(bounds) if begin < end)


def _is_row(row: Any) -> bool:
    match row:
        case [int(), int(), [*counts]]:
            return all(type(count) is int and count >= 0 for count in counts)
    return False
