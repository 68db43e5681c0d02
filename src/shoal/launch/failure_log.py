"""When a run has had enough: too many failures in too short a time, or one part of the data that always fails."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

PERIOD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a worker said about the error that ended it."""

    step: int
    slot: int | None
    """The part of the batch that it computed; None where it was at something else."""
    sample: int | None
    """The sample that raises by itself, by its index; None where none does."""
    error: str
    final: bool
    """Another process could do no better."""

    @classmethod
    def from_message(cls, values: dict[str, Any]) -> Evidence:
        """What the `raised` message says."""
        return cls(**{name: values[name] for name in ("step", "slot", "sample", "error", "final")})

    @property
    def verdict(self) -> str:
        """Why there is no going on once the same has happened in two processes."""
        where = f"step {self.step}" if self.slot is None else f"slot {self.slot} of step {self.step}"
        culprit = "" if self.sample is None else f" The sample that raises it is number {self.sample}."
        repair = "that sample" if self.sample is not None else "it"
        return (
            f"Two processes failed at {where}, so a third would, too: {self.error.rstrip('.')}.{culprit} "
            f"Repair {repair}, or leave it out of the data."
        )


class FailureLog:
    """Failures of processes, by time, and what failed."""

    def __init__(self, most_per_minute: int) -> None:
        self._most = most_per_minute
        self._times: deque[float] = deque()
        self._suspects: set[tuple[int, int | None]] = set()

    def is_too_much(self, now: float) -> bool:
        """Note one more failure; whether it is one more than a run may have within a minute."""
        self._times.append(now)
        while self._times[0] <= now - PERIOD_S:
            self._times.popleft()
        return len(self._times) > self._most

    @property
    def complaint(self) -> str:
        """What to say when it was too much."""
        return f"It was failure number {len(self._times)} within a minute, and max_failures={self._most}."

    def is_poisoned(self, evidence: Evidence) -> bool:
        """Note what failed; whether the same part has failed in another process before."""
        part = evidence.step, evidence.slot
        known = part in self._suspects
        self._suspects.add(part)
        return known
