"""`SpeedShares`: parts of a batch whose sizes follow how fast their slots are filled.

Whoever fills a slot writes its seconds per sample into shared memory. The host of the first place decides the
sizes of the next step before it publishes its own gradients of this one, without which nobody goes on: so all find
the same, and a successor decides again only while nobody can have read what was decided before.
"""

from __future__ import annotations

from shoal.ledger import Sizes, even_sizes, sizes_by_speed
from shoal.strategies.data.shared import SharedState

SMOOTHING = 0.3
"""How much of a slot's pace is the newest measurement."""


class SpeedShares:
    """The sizes of the slots in each step, as far as they are decided."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._is_warm = False
        self._told: Sizes | None = None

    def sizes(self, step: int) -> Sizes | None:
        """Of a step that has been decided; None: even, as the first."""
        row = tuple(self._shared.sizes[step].tolist())
        return row if any(row) else None

    def note(self, step: int, slot: int, seconds: float, samples: int) -> None:
        """A slot was filled, and is published next; how long that took decides what it gets later."""
        if self._is_warm and samples:
            pace, new = self._shared.pace, seconds / samples
            pace[slot] = new if not pace[slot] else pace[slot] + SMOOTHING * (new - pace[slot])
        self._is_warm = True  # the first pass of a process takes longer, and says nothing about the next ones
        if self._completes_first_place(step, slot) and step + 1 < len(self._shared.sizes):
            self._decide(step)

    def _completes_first_place(self, step: int, slot: int) -> bool:
        """Whether this is the last of the first place's slots whose gradients are missing.

        Places pass on as a whole: whoever hosts the first one finds such a slot, or sizes that are decided.
        """
        slots, marks, counters = self._shared.setting.slots_of(0), self._shared.marks, self._shared.counters
        return slot in slots and all(counters[marks.gradients[other]] >= step for other in slots if other != slot)

    def _decide(self, step: int) -> None:
        """Write down the sizes of the step after this one."""
        setting = self._shared.setting
        batch = setting.extent.batch_size
        before = self.sizes(step) or even_sizes(batch, setting.slots)
        sizes = sizes_by_speed(batch, self._shared.pace.tolist(), before)
        self._shared.sizes[step + 1] = sizes
        # A process tells its first decision in any case: its predecessor may have told another one.
        if sizes != self._told and setting.company.on_cuts is not None:
            setting.company.on_cuts(step + 1, sizes)
        self._told = sizes
