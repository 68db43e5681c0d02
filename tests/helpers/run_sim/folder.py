"""What outlives a run's processes, on a bad disk: its folder, with a lock, and the coordinator's store."""

from __future__ import annotations

import random
from typing import Any

from shoal.coordinator.store import MemoryStore, StoreError


class FlakyStore(MemoryStore):
    """A store that, while `is_failing`, reports failure; whether the state was saved nobody can tell."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.is_failing = False
        self.failed_claims = 0
        """Coordinators that could not begin: that ends a run."""
        self._dice = dice

    def claim(self, term: int) -> bool:
        if not self.is_failing:
            return super().claim(term)
        if self._dice.random() < 0.5:
            super().claim(term)
        self.failed_claims += 1
        raise StoreError("The disk does not answer.")

    def save(self, term: int, state: dict[str, Any]) -> None:
        if not self.is_failing:
            super().save(term, state)
            return
        if self._dice.random() < 0.5:
            super().save(term, state)
        raise StoreError("The disk does not answer.")


class SimFolder:
    """A run folder. A supervisor has it for itself."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.holder: str | None = None
        self.has_lock = True
        self.writers: set[str] = set()
        """Supervisors that run in it now."""
        self.checkpoints: set[int] = set()
        """Steps whose state lies here, whole."""
        self.torn: set[int] = set()
        """Steps whose state was reported to lie here, and does not. Whoever resumes sees it."""
        self.is_failing = False

    def take(self, name: str) -> bool:
        """Take the folder, as a supervisor does before all else; whether it was free."""
        if self.has_lock and self.holder is not None:
            return False
        self.holder = name
        self.writers.add(name)
        assert len(self.writers) == 1, f"{sorted(self.writers)} write to one run folder."
        return True

    def give_back(self, name: str) -> None:
        self.writers.discard(name)
        self.holder = None

    def save(self, step: int) -> bool:
        """Write a checkpoint; whether that is reported as done. While the disk fails, either may be untrue."""
        happens, reported = not self.is_failing, not self.is_failing
        if self.is_failing:
            happens, reported = self.dice.random() < 0.5, self.dice.random() < 0.1
        (self.checkpoints if happens else self.torn).add(step)
        return reported
