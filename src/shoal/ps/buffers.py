"""A worker's buffers in shared memory: which one a push goes through, and what may be taken over from the dead.

Servers, and whoever replaces a dead worker, find in a buffer what its worker left there. A label says what it is,
and is there only while the buffer is whole: it is taken away before the first byte changes, and put back when all
of the gradient is there. Where parts are pushed as they are made, that is after the first shards have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.ps.link import Offer
from shoal.ps.worker import WorkerMachine
from shoal.spec.served_footprint import BUFFER_SETS, BUFFERS_PER_SET, BUFFERS_PER_SLOT


@dataclass(frozen=True)
class Label:
    """What a whole buffer holds: the push of a clock and a cell, and what goes with it; not whole: of clock 0."""

    clock: int = 0
    cell: int = 0
    weight: float = 0.0
    loss: float = 0.0
    scaled: bool = False
    scale: float = 1.0


class Labels(Protocol):
    """Where labels lie, by buffer: beside the buffers, so that they outlive their writer."""

    def label(self, number: int) -> Label:
        """What a buffer holds."""

    def put_label(self, number: int, label: Label) -> None:
        """Say what a buffer holds; a death in the middle of it must leave the buffer without a label."""


class LabelWords:
    """Labels in memory: of each the `words` that take it. Those of another attempt, which counted its clocks from
    elsewhere, are none."""

    def __init__(self, words: Sequence[np.ndarray], *, attempt: int) -> None:
        self._words = words
        self._attempt = attempt

    def label(self, number: int) -> Label:
        """What a buffer holds; of clock 0 where it was never filled."""
        clock, cell, weight, loss, scaled, scale, attempt = self._words[number].tolist()
        if attempt != self._attempt:
            return Label()
        return Label(int(clock), int(cell), weight, loss, bool(scaled), scale)

    def put_label(self, number: int, label: Label) -> None:
        """Say what a buffer holds. Its clock, one word, is written last, and 0 first: a death tears no label."""
        words = self._words[number]
        words[0] = 0.0
        words[1:] = (label.cell, label.weight, label.loss, label.scaled, label.scale, self._attempt)
        words[0] = label.clock


class Buffers:
    """The buffers of one worker, and its push under way; `life_of` says of a slot how many had it before."""

    def __init__(self, machine: WorkerMachine, labels: Labels, life_of: Callable[[int], int]) -> None:
        self._machine = machine
        self._labels = labels
        self._life_of = life_of
        self._pushes: dict[int, int] = {}
        """By buffer: the push whose gradient it holds."""
        self._label: Label | None = None
        self.sequence = 0
        """Of the push under way."""
        self.buffer = 0
        """Where it lies."""

    def buffer_of(self, slot: int, clock: int) -> int:
        """The buffer for what is computed for a slot in this step."""
        buffers = self._life_of(slot) % BUFFER_SETS
        return BUFFERS_PER_SLOT * slot + BUFFERS_PER_SET * buffers + clock % BUFFERS_PER_SET

    def is_free(self, buffer: int) -> bool:
        """Whether no server reads the buffer any more."""
        return buffer not in self._pushes or self._machine.is_released(self._pushes[buffer])

    def begin(self, buffer: int) -> None:
        """The buffer, which is free, is about to change."""
        self._labels.put_label(buffer, Label())

    def open(self, offer: Offer, label: Label | None) -> None:
        """Name the push of a buffer. Its label waits until it is whole; None where it has one already."""
        self.sequence, self.buffer = self._machine.open_push(offer), offer.buffer
        self._pushes[self.buffer] = self.sequence
        self._label = label

    def complete(self) -> Collection[int]:
        """All of the gradient is there; returns the shards that have not been sent theirs."""
        if self._label is not None:
            self._labels.put_label(self.buffer, self._label)
        return self._machine.unsent(self.sequence)

    def left_by_another(self, slot: int, clock: int, cell: int) -> tuple[int, Label] | None:
        """The whole buffer, if any, in which somebody before has left what is now this worker's to push."""
        for buffer in range(BUFFERS_PER_SLOT * slot, BUFFERS_PER_SLOT * (slot + 1)):
            label = self._labels.label(buffer)
            if label.clock and (label.clock, label.cell) == (clock, cell):
                return buffer, label
        return None
