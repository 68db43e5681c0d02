"""Which failure to show: one cause often fells several processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why one process failed."""

    global_rank: int
    message: str
    details: str = ""
    consequence: bool = False
    """It only says that another process is gone."""
    signum: int | None = None
    """The signal that ended it, where it could say nothing itself."""

    @property
    def is_likely_cause(self) -> bool:
        """A kill from outside and a failure of one's own come first; a crash is often what others cause."""
        return not self.consequence and self.signum in (None, signal.SIGKILL)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure to show, of failures in the order they were noticed."""
    return min(failures, key=lambda failure: (failure.consequence, not failure.is_likely_cause))
