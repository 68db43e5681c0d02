"""Which failure to show: one cause often fells several processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why one process failed."""

    message: str
    global_rank: int | None = None
    """None where it was no worker."""
    details: str = ""
    consequence: bool = False
    """It only says that another process is gone."""
    signum: int | None = None
    """The signal that ended it, where it could say nothing itself."""
    exit_code: int = 1
    """What a shell would show for it."""
    is_transient: bool = False
    """Another attempt may go well: it was killed, or lost a peer, or raised what Shoal does not refuse."""

    @property
    def doubt(self) -> int:
        """How likely another failure caused this one; 0 is least.

        No process sends SIGKILL to its peers, so such a death is a cause, even where a peer's complaint
        about it arrives first. A crash in native code is often how a peer's end is taken.
        """
        if self.consequence:
            return 3
        if self.signum is None:
            return 1
        return 0 if self.signum == signal.SIGKILL else 2


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure to show, of failures in the order they were noticed."""
    return min(failures, key=lambda failure: failure.doubt)
