"""Sums over the slots of a step through shared memory, in the middle of a pass: for synchronised BatchNorm."""

from __future__ import annotations

import torch

from shoal.errors import SpecError
from shoal.strategies.data.shared import SharedState


class SlotSums:
    """Sums over slots inside a forward or backward pass; every exchange of a step has its own room."""

    def __init__(self, shared: SharedState, calls_per_step: int) -> None:
        self._shared = shared
        slots = range(shared.setting.slots)
        self._rooms = [shared.segment.tensor(f"exchange/{number}", torch.float64) for number in slots]
        self._per_step = calls_per_step + 1

    def begin(self, step: int, slot: int) -> None:
        """A pass over one slot of a step begins."""
        self._step, self._slot = step, slot
        self._used = self._calls = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what all slots bring to this exchange."""
        start, self._used = self._used, self._used + values.numel()
        if self._used > self._rooms[0].numel():
            raise SpecError(
                "data: batchnorm=sync met a BatchNorm layer that runs more than once in a forward pass; "
                "use batchnorm=local for this model."
            )
        self._calls += 1
        marks, counters = self._shared.marks, self._shared.counters
        serial = self._step * self._per_step + self._calls
        self._rooms[self._slot][start : self._used] = values
        if counters[marks.exchanged[self._slot]] < serial:  # a successor repeats what its predecessor published
            counters.publish(marks.exchanged[self._slot], serial)
        counters.wait_all(marks.exchanged, serial)
        # In slot order by everybody: all slots must normalise by the same bits, or their copies would part.
        total = self._rooms[0][start : self._used].clone()
        for room in self._rooms[1:]:
            total.add_(room[start : self._used])
        return total
