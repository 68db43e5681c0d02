"""A shard's values as one number that depends on every update and on their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from shoal.comm.codec import Frame, Message
from shoal.ps.buffers import Label
from shoal.ps.messages import Push

MOST_ENTRIES = 5
WIDTH = 8
_MASK = (1 << 8 * WIDTH) - 1


def gradient(shard: int, cells: Sequence[int], version: int) -> bytes:
    """What a worker computes from these cells and this version of the shard."""
    return _number(shard, version, *cells).to_bytes(WIDTH, "little")


class Home:
    """The memory of one copy of a shard: whoever thinks that it is his writes there."""

    def __init__(self, shard: int) -> None:
        self.pages = Pages()
        self.clear(shard)

    def clear(self, shard: int) -> None:
        self.shard = shard
        self.chain = self.second_half = shard + 1
        self.saved = self.chain
        """Both halves, as they were before they changed."""
        self.updates = 0
        """What a worker sees of the values: they depend on how many updates they have had."""
        self.cells: list[int] = []
        """Every cell that went in, as often as it did."""
        self.factors: list[float] = []
        """What the rounds that were closed together with other shards were multiplied by."""
        self.skipped: list[int] = []
        """Those of them that were not applied."""
        self.torn: list[int] = []
        """Those whose gradient was not the one that was pushed."""
        self.marked: int | None = None

    def copy_from(self, other: Home) -> None:
        self.chain, self.second_half = other.chain, other.second_half
        self.updates, self.marked = other.updates, other.marked
        self.cells, self.factors, self.skipped = list(other.cells), list(other.factors), list(other.skipped)
        self.torn = list(other.torn)


Memory = dict[tuple[int, int], Home]
"""By shard and copy: what lies there. It stays when its holder dies, until a new one takes the home."""


@dataclass
class Gradients:
    """The buffers in which workers leave what they push, and their labels; they outlive who wrote them."""

    labels: dict[int, Label] = field(default_factory=dict)
    parts: dict[tuple[int, int], tuple[list[int], bytes]] = field(default_factory=dict)
    """By buffer and shard: the cells that a part was computed on, and itself; nothing while it is not whole."""

    def label(self, number: int) -> Label:
        return self.labels.get(number, Label())

    def put_label(self, number: int, label: Label) -> None:
        self.labels[number] = label

    def tear(self, number: int) -> None:
        """From now on the buffer is written to."""
        for key in [key for key in self.parts if key[0] == number]:
            del self.parts[key]


class Progress(Enum):
    """How far the newest entry has come into the values."""

    NONE = auto()
    TORN = auto()
    COMPLETE = auto()


@dataclass
class Pages:
    """What lies in a home besides the values."""

    books: Message | None = None
    entries: list[Message] = field(default_factory=list)
    progress: Progress = Progress.NONE
    is_void: bool = False


class HomeJournal:
    """One process's view of a home's journal."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.progress = pages.progress
        """Of the entry that is taken in."""
        self.is_kept = False

    @property
    def is_void(self) -> bool:
        return self._pages.is_void

    def give_up(self) -> None:
        self._pages.is_void, self.is_kept = True, False

    def begin(self, books: Message) -> bool:
        self._pages.books, self._pages.entries, self._pages.is_void = books, [], False
        self.is_kept = True
        self.note(Progress.NONE)
        return True

    def append(self, entry: Message) -> bool:
        if len(self._pages.entries) == MOST_ENTRIES:
            return False
        self._pages.entries.append(entry)
        self.note(Progress.NONE)
        return True

    def books(self) -> Message | None:
        self.is_kept = self._pages.books is not None
        return self._pages.books

    def entries(self) -> Iterator[Message]:
        *older, newest = self._pages.entries or [None]
        for entry in older:
            self.progress = Progress.COMPLETE
            yield entry
        if newest is not None:
            self.progress = self._pages.progress
            yield newest

    def note(self, progress: Progress) -> None:
        self.progress = self._pages.progress = progress


class ChainValues:
    """The `ShardValues` of the simulation. Where memory is shared it is filled from `other`, the other copy.

    `gradients`: where the bulk of pushes lies; None where they bring it.
    An update changes two halves, and calls `amid` between them: who dies there leaves the home torn.
    """

    def __init__(
        self,
        shard: int,
        before_update: Callable[[], None] = lambda: None,
        home: Home | None = None,
        other: Home | None = None,
        gradients: Gradients | None = None,
        amid: Callable[[], None] = lambda: None,
    ) -> None:
        self._amid = amid
        self.home = home or Home(shard)
        self._shard = shard
        self._other = other
        self.journal = None if other is None else HomeJournal(self.home.pages)
        self._before_update = before_update
        self._gradients = gradients

    def initialise(self) -> None:
        self.home.clear(self._shard)

    def resume(self, facts: dict[str, Any]) -> None:
        assert self.journal is not None
        if self.journal.progress is Progress.TORN:
            self.home.chain = self.home.second_half = self.home.saved
            self.journal.note(Progress.NONE)

    @property
    def _is_done(self) -> bool:
        """Whether the update under way is in the values: it is only taken in again."""
        journal = self.journal
        return journal is not None and journal.is_kept and journal.progress is Progress.COMPLETE

    def _note(self, progress: Progress) -> None:
        if self.journal is not None and self.journal.is_kept:
            self.journal.note(progress)

    def fits(self, push: Push) -> bool:
        if self._gradients is not None:
            return not push.frames
        return len(push.frames) == 1 and len(push.frames[0]) == WIDTH

    def own_part(self, gradients: Sequence[Push], *, scale: float) -> tuple[Frame, ...]:
        self._before_update()
        return (_number(*self._numbers(gradients), scale).to_bytes(WIDTH, "little"),)

    def fits_part(self, shard: int, frames: Sequence[Frame]) -> bool:
        return [len(frame) for frame in frames] == [WIDTH]

    def factor(self, parts: Mapping[int, Sequence[Frame]], *, scale: float) -> float:
        numbers = (int.from_bytes(bytes(parts[shard][0]), "little") for shard in sorted(parts))
        return 0.5 + (_number(*numbers) % 1000) / 4000

    def add(self, frames: Sequence[Frame], *, loss: float, steps: int) -> None:
        raise AssertionError("only whole copies add what others changed")

    def add_parts(self, parts: Sequence[Sequence[Frame]]) -> tuple[Frame, ...]:
        raise AssertionError("only whole copies add up")

    def step(self, gradients: Sequence[Push], *, scale: float, lr_scale: float, loss: float, last: bool) -> None:
        self._before_update()
        if self._mix(gradients, scale, lr_scale, loss, last) and scale != 1.0:
            self.home.factors.append(scale)

    def skip(self, pushes: Sequence[Push], *, loss: float, last: bool) -> None:
        if self._is_done:
            return
        self._note(Progress.COMPLETE)
        self.home.updates += 1
        for push in pushes:
            self.home.cells.extend(push.cells)
            self.home.skipped.extend(push.cells)

    def average(self, pushes: Sequence[Push], *, share: float) -> None:
        self._mix(pushes, share)

    def parts(self, *, whole: bool) -> Iterable[Sequence[Frame]]:
        packed = self.home.chain.to_bytes(WIDTH, "little")
        return [(packed,)] if whole else [(packed[:4],), (packed[4:],)]

    def facts(self) -> dict[str, Any]:
        return {
            "updates": self.home.updates,
            "cells": list(self.home.cells),
            "factors": list(self.home.factors),
            "skipped": list(self.home.skipped),
            "torn": list(self.home.torn),
            "marked": self.home.marked,
        }

    def frames(self) -> tuple[Frame, ...]:
        return (self.home.chain.to_bytes(WIDTH, "little"),)

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        if self._other is not None:
            self.home.copy_from(self._other)
            return
        self.home.chain = self.home.second_half = int.from_bytes(bytes(frames[0]), "little")
        self.home.updates = facts["updates"]
        self.home.cells = list(facts["cells"])
        self.home.factors = list(facts["factors"])
        self.home.skipped = list(facts["skipped"])
        self.home.torn = list(facts["torn"])
        self.home.marked = facts["marked"]

    def mark(self) -> None:
        if not self._is_done:
            self.home.marked = self.home.chain

    def rollback(self) -> bool:
        if self.home.marked is None:
            return False
        if not self._is_done:
            self.home.chain = self.home.second_half = self.home.marked
            self.home.updates += 1
            self._note(Progress.COMPLETE)
        return True

    def digest(self) -> str:
        return f"{self.home.chain:016x}{self.home.second_half:016x}"

    def _mix(self, pushes: Sequence[Push], *how: float) -> bool:
        """Change both halves; False where they have changed already."""
        if self._is_done:
            return False
        home = self.home
        home.saved = home.chain
        self._note(Progress.TORN)
        home.chain = _number(home.chain, *self._numbers(pushes), *how)
        self._amid()
        home.second_half = home.chain
        self._note(Progress.COMPLETE)
        home.updates += 1
        for push in pushes:
            home.cells.extend(push.cells)
        return True

    def _numbers(self, pushes: Sequence[Push]) -> list[int]:
        return [int.from_bytes(self._bulk(push), "little") for push in pushes]

    def _bulk(self, push: Push) -> bytes:
        if self._gradients is None:
            return bytes(push.frames[0])
        cells, part = self._gradients.parts.get((push.buffer, self.home.shard), ([], b""))
        if cells != push.cells:
            self.home.torn.extend(push.cells)
        return part


def _number(*parts: float) -> int:
    # Tuples of numbers hash alike in every process; text would not.
    return hash(parts) & _MASK
