"""What slots bring to each other, through memory that outlives whoever wrote it.

Each slot has a room, in which all that it brings in a step lies one behind the other until the next step. So
whoever follows a killed process makes its slots' passes again from the beginning, finds there what the others
brought meanwhile, and writes the same bits where its predecessor did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.arena import GrowingRoom, Segment
from shoal.arena.tensors import as_bytes
from shoal.model.gathering import Question
from shoal.step.passes import Brought
from shoal.strategies.groups.looks import LOOK_WORDS, look_of, seen_in

_LINE = 64
_LOOK_BYTES = 8 * LOOK_WORDS
_STEP, _BASE, _LEFT = range(3)
"""Words of a room: the step whose passes have begun, what its counter was before, the step that it has left."""


class RoomSwap:
    """A counter for each slot says how often it has brought something, in all steps."""

    def __init__(self, segment: Segment, slots: int, on_idle: Callable[[], None] | None) -> None:
        self._on_idle = on_idle
        self._rooms = [segment.room(slot) for slot in range(slots)]
        self._counters = [room.counter(self._look_up) for room in self._rooms]
        self._step = self._serial = 0
        self._awaited = 0
        self._ends = [0] * slots
        """By slot: where in its room the next thing lies."""

    def begin(self, step: int, slots: Sequence[int]) -> None:
        self._step, self._ends = step, [0] * len(self._rooms)
        for slot in slots:
            words = self._rooms[slot].words
            if words[_STEP] != step:  # else somebody has begun it, who did not come to its end
                words[_BASE] = self._counters[slot][0]
                words[_STEP] = step
        # In a step that is over all slots have come equally often: their counters are the same then.
        self._serial = self._rooms[slots[0]].words[_BASE]

    def swap(self, brought: Mapping[int, Brought]) -> Sequence[Brought | None]:
        self._serial += 1
        for slot, own in brought.items():
            _write(self._rooms[slot], self._ends[slot], own)
            if self._counters[slot][0] < self._serial:  # a successor repeats what its predecessor published
                self._counters[slot].publish(0, self._serial)
        return [self._await(slot, brought.get(slot)) for slot in range(len(self._rooms))]

    def left(self, slot: int) -> None:
        self._rooms[slot].words[_LEFT] = self._step

    def end(self) -> Mapping[int, Brought]:
        return {}

    def _await(self, slot: int, own: Brought | None) -> Brought | None:
        self._awaited = slot
        try:
            self._counters[slot].wait(0, self._serial)
        except _HasLeft:
            return None
        found = own or _read(self._rooms[slot], self._ends[slot])
        self._ends[slot] += _size_of(found)
        return found

    def _look_up(self) -> None:
        """Whoever has left comes no more."""
        if self._rooms[self._awaited].words[_LEFT] == self._step:
            if self._counters[self._awaited][0] < self._serial:
                raise _HasLeft
        elif self._on_idle is not None:
            self._on_idle()


class _HasLeft(Exception):
    """The slot that is waited for has ended its passes."""


def _size_of(brought: Brought) -> int:
    num_bytes = _LOOK_BYTES + brought.values.numel() * brought.values.element_size()
    return -(-num_bytes // _LINE) * _LINE


def _write(room: GrowingRoom, start: int, brought: Brought) -> None:
    values, _ = brought.values, room.bytes(start, _size_of(brought))
    room.bytes(start, _LOOK_BYTES).view(torch.int64).copy_(torch.tensor(look_of(brought)))
    count = values.numel() * values.element_size()
    room.bytes(start + _LOOK_BYTES, count).copy_(as_bytes(values.contiguous()))


def _read(room: GrowingRoom, start: int) -> Brought:
    question, dtype, shape = seen_in(room.bytes(start, _LOOK_BYTES).view(torch.int64).tolist())
    count = math.prod(shape) * dtype.itemsize
    # A copy: who brought it may be in the next step before this slot's backward pass is over.
    values = room.bytes(start + _LOOK_BYTES, count).clone().view(dtype).view(shape)
    return Brought(Question(question), values)
