"""Which failure to show: one cause often fells several processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import FAILED, MISUSED, WorkerFailed
from shoal.launch.crew import Hand
from shoal.launch.deaths import explain_death
from shoal.observe.happenings import Failed


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
    exit_code: int = FAILED
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

    @property
    def error(self) -> WorkerFailed:
        """What to raise for it."""
        return WorkerFailed(
            self.message,
            global_rank=self.global_rank,
            details=self.details,
            exit_code=self.exit_code,
            is_transient=self.is_transient,
        )


def explain_end(hand: Hand) -> str:
    """One sentence about a process that has ended without a word of its own."""
    if hand.hang:
        return f"{hand.name.capitalize()} hung and was ended: {hand.hang}."
    assert hand.end is not None
    return explain_death(hand.name, hand.end)


def failure_of(hand: Hand, message: str) -> Failure:
    """The end of a process as a failure of the run."""
    assert hand.end is not None
    code = hand.end.exit_code
    return Failure(
        message=message,
        global_rank=hand.rank,
        details=hand.end.last_output,
        signum=-code if code < 0 else None,
        exit_code=code if code >= 0 else 128 - code,
        is_transient=code < 0 or bool(hand.complaint),
    )


def told_failure(hand: Hand, told: Failed) -> Failure:
    """What a process said about its own failure."""
    is_consequence = bool(told.consequence)
    return Failure(
        message=told.message,
        global_rank=hand.rank,
        details=told.traceback,
        consequence=is_consequence,
        exit_code=MISUSED if told.misuse else FAILED,
        is_transient=is_consequence,
    )


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure to show, of failures in the order they were noticed."""
    return min(failures, key=lambda failure: failure.doubt)
