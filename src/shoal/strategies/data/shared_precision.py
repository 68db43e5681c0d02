"""The loss scale in shared memory: whoever takes over a place finds what the steps so far have come to.

Each slot writes what its gradients look like beside its other numbers, so the step is decided when they all are
there. What follows is kept for two steps, in turn: a step is begun from the one before it, which stays until all
have begun the next.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.model.half_range import HalfState, Seen
from shoal.model.precision import Precision
from shoal.strategies.data.shared import SharedState

KEPT = 2
"""Steps whose outcome is kept."""


def bytes_of(precision: Precision, slots: int) -> tuple[int, int]:
    """Room for what all slots have seen, and for what that came to."""
    if not precision.scales:
        return 0, 0
    seen = precision.measure(0, ())
    return 8 * slots * len(seen.values), 8 * KEPT * len(precision.state.values)


class SharedPrecision:
    """What a job's processes share of their precision, where steps may be skipped."""

    def __init__(self, shared: SharedState, precision: Precision) -> None:
        self._precision = precision
        slots = shared.setting.slots
        self.seen = shared.segment.tensor("seen", torch.float64).numpy().reshape(slots, -1)
        """By slot: what its gradients look like."""
        self._states = shared.segment.tensor("half", torch.float64).numpy().reshape(KEPT, -1)

    def publish(self, step: int) -> None:
        """Make this process's state the one after `step`."""
        self.commit(step, self._precision.state)

    def begin(self, step: int) -> None:
        """Compute this step as the one before it has left the state."""
        self._precision.adopt(HalfState.of(self._states[(step - 1) % KEPT].tolist()))

    def note(self, step: int, slot: int, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Say what a slot's gradients look like."""
        self.seen[slot] = self._precision.measure(step, gradients).values

    def outcome(self, step: int) -> HalfState:
        """What the slots have seen comes to; all of them have spoken."""
        return self._precision.after(step, Seen.of(self.seen.sum(0).tolist()))

    def commit(self, step: int, state: HalfState) -> None:
        """Leave the outcome of a step to all; doing it twice does no harm."""
        self._states[step % KEPT] = state.values
