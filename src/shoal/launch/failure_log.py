"""When a run has had enough: too many failures in too short a time, or one part of the data that always fails."""

from __future__ import annotations

from collections import deque

from shoal.observe.happenings import Raised

PERIOD_S = 60.0


def verdict(raised: Raised) -> str:
    """Why there is no going on once the same was raised in two processes."""
    where = f"step {raised.step}" if raised.slot is None else f"slot {raised.slot} of step {raised.step}"
    return f"Two processes failed at {where}, so a third would, too: {raised.error.rstrip('.')}. {_advice(raised)}"


def _advice(raised: Raised) -> str:
    if raised.sample is None:
        return "Repair it, or leave it out of the data."
    if raised.tried is None or raised.raising is None or raised.raising == 1:
        culprit = f"The sample that raises it is number {raised.sample}."
        return f"{culprit} Repair that sample, or leave it out of the data."
    share = "all" if raised.raising == raised.tried else str(raised.raising)
    return (
        f"It is not one sample that raises it, but {share} of {raised.tried} that were tried, number "
        f"{raised.sample} for one: see whether model, loss and labels fit the data."
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

    def is_poisoned(self, raised: Raised) -> bool:
        """Note what failed; whether the same part has failed in another process before."""
        part = raised.step, raised.slot
        known = part in self._suspects
        self._suspects.add(part)
        return known
