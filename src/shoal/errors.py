"""What can go wrong, as one tree.

    ShoalError
    ├── SpecError (ValueError)    what the user asked for cannot be: a wrong name, key, value or path
    │   └── TaskError             the task's own code misbehaves: a vector loss, no parameters
    │       └── Diverged          the loss is no number any more
    ├── LaunchError               processes could not be started, or the machine refused
    │   ├── WorkerFailed          a process of the run failed for good; carries its rank and traceback
    │   ├── DiskRefused           something could not be written: no room, no permission, a broken disk
    │   └── OutOfMemory           a worker would need, or has needed, more memory than it may have
    ├── CommError                 bytes did not arrive
    │   ├── PeerLost              the other side is gone
    │   ├── CommTimeout           the other side did not answer in time
    │   └── ProtocolError         what arrived is not a valid message
    ├── CheckpointError           a saved model is missing, torn or not this model's
    ├── InjectedFault             a worker raises because the user asked for it (chaos)
    └── Interrupted               the user pressed Ctrl-C; the message says what was saved

Messages are one sentence in three parts: what was set, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: it failed; what was asked for cannot be; the user has ended it."""


class ShoalError(Exception):
    """Base of everything Shoal raises on purpose."""


class SpecError(ShoalError, ValueError):
    """The user asked for something that cannot be."""


class TaskError(SpecError):
    """The task's own code misbehaves."""


class Diverged(TaskError):
    """The loss is not a number any more, or infinite."""


class LaunchError(ShoalError):
    """Processes could not be started, or the machine refused."""


class WorkerFailed(LaunchError):
    """A process of the run failed for good."""

    def __init__(
        self,
        message: str,
        *,
        global_rank: int | None = None,
        details: str = "",
        exit_code: int = 1,
        is_transient: bool = False,
    ) -> None:
        super().__init__(message)
        self.global_rank = global_rank
        self.details = details
        """The failing rank's traceback or last output; empty where the message says it all."""
        self.exit_code = exit_code
        """What a shell would show for that process: 128 and more for a signal."""
        self.is_transient = is_transient
        """Whether another attempt may go well, as after a kill."""


class DiskRefused(LaunchError):
    """Something could not be written."""

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full
        """Whether it would help to free some space."""


class OutOfMemory(LaunchError):
    """A worker would need, or has needed, more memory than it may have."""


class CommError(ShoalError):
    """Bytes did not arrive."""

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLost(CommError):
    """The other side is gone."""


class CommTimeout(CommError):
    """The other side did not answer in time."""


class ProtocolError(CommError):
    """What arrived is not a valid message."""


class CheckpointError(ShoalError):
    """A saved model is missing, torn or not this model's."""


class InjectedFault(ShoalError):
    """A worker raises because the user asked for it."""


class Interrupted(ShoalError):
    """The user pressed Ctrl-C, or the run was asked to end."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SpecError:
    """An error for a name nobody knows: it lists the known ones and guesses the one that was meant."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return SpecError(f"{kind} {name!r} is not known.{guess} Choose one of: {', '.join(names)}.")
