"""A shard's values as one number that depends on every update and on their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.codec import Frame
from shoal.ps.buffers import Label
from shoal.ps.messages import Push

WIDTH = 8
_MASK = (1 << 8 * WIDTH) - 1


def gradient(shard: int, cells: Sequence[int], version: int) -> bytes:
    """What a worker computes from these cells and this version of the shard."""
    return _number(shard, version, *cells).to_bytes(WIDTH, "little")


class Place:
    """The memory of one copy of a shard: whoever thinks that it is his writes there."""

    def __init__(self, shard: int) -> None:
        self.clear(shard)

    def clear(self, shard: int) -> None:
        self.shard = shard
        self.chain = shard + 1
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

    def copy_from(self, other: Place) -> None:
        self.chain, self.updates, self.marked = other.chain, other.updates, other.marked
        self.cells, self.factors, self.skipped = list(other.cells), list(other.factors), list(other.skipped)
        self.torn = list(other.torn)


Memory = dict[tuple[int, int], Place]
"""By shard and copy: what lies there. It stays when its holder dies, until a new one takes the place."""


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


class ChainValues:
    """The `ShardValues` of the simulation. Where memory is shared it is filled from `other`, the other copy.

    `gradients`: where the bulk of pushes lies; None where they bring it.
    """

    def __init__(
        self,
        shard: int,
        before_update: Callable[[], None] = lambda: None,
        place: Place | None = None,
        other: Place | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.place = place or Place(shard)
        self.place.clear(shard)
        self._other = other
        self._before_update = before_update
        self._gradients = gradients

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
        self._mix(gradients, scale, lr_scale, loss, last)
        if scale != 1.0:
            self.place.factors.append(scale)

    def skip(self, pushes: Sequence[Push], *, loss: float, last: bool) -> None:
        self.place.updates += 1
        for push in pushes:
            self.place.cells.extend(push.cells)
            self.place.skipped.extend(push.cells)

    def average(self, pushes: Sequence[Push], *, share: float) -> None:
        self._mix(pushes, share)

    def parts(self, *, whole: bool) -> Iterable[Sequence[Frame]]:
        packed = self.place.chain.to_bytes(WIDTH, "little")
        return [(packed,)] if whole else [(packed[:4],), (packed[4:],)]

    def frames(self) -> tuple[tuple[Frame, ...], dict[str, Any]]:
        return (self.place.chain.to_bytes(WIDTH, "little"),), {
            "updates": self.place.updates,
            "cells": list(self.place.cells),
            "factors": list(self.place.factors),
            "skipped": list(self.place.skipped),
            "torn": list(self.place.torn),
            "marked": self.place.marked,
        }

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        if self._other is not None:
            self.place.copy_from(self._other)
            return
        self.place.chain = int.from_bytes(bytes(frames[0]), "little")
        self.place.updates = facts["updates"]
        self.place.cells = list(facts["cells"])
        self.place.factors = list(facts["factors"])
        self.place.skipped = list(facts["skipped"])
        self.place.torn = list(facts["torn"])
        self.place.marked = facts["marked"]

    def mark(self) -> None:
        self.place.marked = self.place.chain

    def rollback(self) -> bool:
        if self.place.marked is None:
            return False
        self.place.chain = self.place.marked
        self.place.updates += 1
        return True

    def digest(self) -> str:
        return f"{self.place.chain:016x}"

    def _mix(self, pushes: Sequence[Push], *how: float) -> None:
        self.place.chain = _number(self.place.chain, *self._numbers(pushes), *how)
        self.place.updates += 1
        for push in pushes:
            self.place.cells.extend(push.cells)

    def _numbers(self, pushes: Sequence[Push]) -> list[int]:
        return [int.from_bytes(self._bulk(push), "little") for push in pushes]

    def _bulk(self, push: Push) -> bytes:
        if self._gradients is None:
            return bytes(push.frames[0])
        cells, part = self._gradients.parts.get((push.place, self.place.shard), ([], b""))
        if cells != push.cells:
            self.place.torn.extend(push.cells)
        return part


def _number(*parts: float) -> int:
    # Tuples of numbers hash alike in every process; text would not.
    return hash(parts) & _MASK
