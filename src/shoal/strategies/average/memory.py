"""What workers that average leave in the host's memory, where it outlives them.

When all meet, each leaves its values and its optimizer's state. There is room for two meetings: nobody writes over
what it left at one before all have come to the next, and whoever follows a dead worker needs what was left last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.arena import Segment
from shoal.model.optimizer.whole_state import StateImage
from shoal.spec.averaging_footprint import HEAD_WORDS, num_rows, word_columns
from shoal.spec.footprint import MemoryRegion
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Setting
from shoal.strategies.groups.vectors import Vectors


class AverageMarks:
    """Counters, by what has happened. One writer each; they only rise."""

    def __init__(self, places: int) -> None:
        self.opened = 0
        """What all begin from is there."""
        self.agreed = 1
        """Agreements whose result is there."""
        self.spoken = range(2, 2 + places)
        """By place: the last step that it has told of."""
        self.arrived = range(self.spoken.stop, self.spoken.stop + places)
        """By place: the meetings at which it has left all that it has."""
        self.shared_rows = range(self.arrived.stop, self.arrived.stop + places)
        """By place: its rows of the table are filled, for the evaluation of this number."""


@dataclass(frozen=True, kw_only=True)
class LeftHead:
    """What is said of what a worker has left."""

    step: int
    is_last: bool
    """Whether all had agreed to stop after this step."""
    agreements: int
    """Before that meeting."""
    is_kept: bool
    """Whether the optimizer's state could be left."""
    weights: torch.Tensor
    """By worker: what it was trained on since the last agreement."""


class AverageMemory:
    """The regions of the segment, as tensors."""

    def __init__(
        self, values: AgreedValues, setting: Setting, regions: Sequence[MemoryRegion], every: int
    ) -> None:
        self._values = values
        self._extent, self._places = setting.extent, setting.world.world_size
        self._rows = num_rows(every)
        self.segment = segment = Segment(setting.world.arena_fd)
        for region in regions:
            segment.reserve(region.name, region.num_bytes)
        segment.map()
        self.marks = AverageMarks(self._places)
        self.counters = segment.counters("counters", setting.company.on_idle)
        self.losses: np.ndarray = segment.tensor("losses", torch.float64).numpy()
        self.counts: np.ndarray = segment.tensor("counts", torch.int32).numpy().reshape(-1, setting.slots)
        columns = word_columns(self._places, setting.slots)
        self._words = segment.tensor("words", torch.float64).view(self._rows, self._places, columns)
        self._table = segment.tensor("table", torch.float64)

    def table_of(self, serial: int, shape: tuple[int, int]) -> torch.Tensor:
        """Where a table is exchanged. Those of earlier calls stay, as far as there is room."""
        extent = self._extent
        start = (serial - 1) % extent.tables * extent.table_rows * extent.table_columns
        return self._table[start : start + shape[0] * shape[1]].view(shape)

    def words(self, step: int) -> torch.Tensor:
        """By place: what it has told of a step."""
        return self._words[step % self._rows]

    # What a worker leaves.

    def leave(
        self, place: int, meeting: int, head: LeftHead, optimizer: torch.optim.Optimizer, beside: Any
    ) -> None:
        """The replica's values, and what its optimizer keeps."""
        half = meeting % 2
        values = self._values
        values.read_into(self.left_values(place, meeting))
        for room, number in zip(self.left_numbers(place, meeting), values.whole_numbers(), strict=True):
            room.copy_(number)
        is_kept = self._state(place, half).write(optimizer, head.step, beside)
        words = [head.step, head.is_last, head.agreements, is_kept, *head.weights.tolist()]
        self._head(place, half).copy_(torch.tensor(words, dtype=torch.float64))

    def left_head(self, place: int, meeting: int) -> LeftHead:
        """What is said of what a worker has left at a meeting."""
        found = self._head(place, meeting % 2)
        step, is_last, agreements, is_kept = (int(word) for word in found[:HEAD_WORDS].tolist())
        return LeftHead(
            step=step,
            is_last=bool(is_last),
            agreements=agreements,
            is_kept=bool(is_kept),
            weights=found[HEAD_WORDS:].clone(),
        )

    def left_values(self, place: int, meeting: int) -> Vectors:
        """The values that it had, where they lie."""
        return self._values.views(self.segment.tensor(f"values/{place}/{meeting % 2}", torch.uint8))

    def left_numbers(self, place: int, meeting: int) -> list[torch.Tensor]:
        """Its counts."""
        memory = self.segment.tensor(f"numbers/{place}/{meeting % 2}", torch.uint8)
        found, start = [], 0
        for each in self._values.whole_numbers():
            found.append(memory[start : start + each.nbytes].view(each.dtype).view(each.shape))
            start += -(-each.nbytes // 8) * 8
        return found

    def left_state(self, place: int, meeting: int) -> StateImage:
        """What its optimizer kept, and what was beside that."""
        return self._state(place, meeting % 2)

    def _head(self, place: int, half: int) -> torch.Tensor:
        return self.segment.tensor(f"head/{place}/{half}", torch.float64)

    def _state(self, place: int, half: int) -> StateImage:
        return StateImage(self.segment.tensor(f"state/{place}/{half}", torch.uint8))

    # What all agreed on.

    def agreed(self, number: int) -> Vectors:
        """After so many agreements."""
        return self._values.views(self.segment.tensor(f"agreed/{number % 2}", torch.uint8))

    def outer(self, number: int) -> StateImage:
        """What the outer optimizer kept then."""
        return StateImage(self.segment.tensor(f"outer/{number % 2}", torch.uint8))
