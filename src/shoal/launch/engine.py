"""The contract of an engine: it starts processes on hosts, and says which live and which have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.comm.channel import Channel
from shoal.spec import Job, World


@dataclass
class Member:
    """One process of a run."""

    role: str
    global_rank: int
    """A worker's rank; of any other role its number, until a spare takes a worker's place."""
    channel: Channel
    log_name: str
    """Where its output is, for people."""
    pid: int | None = None
    """None until it has been started."""
    exit_code: int | None = None
    """None while it lives; negative for the signal that ended it."""
    node: int = 0
    """Its own number among all processes that a job with servers ever had."""
    places: tuple[int, ...] = ()
    """The ranks whose work a worker does; its own is the lowest of them."""

    def __post_init__(self) -> None:
        if self.role == "worker" and not self.places:
            self.places = (self.global_rank,)

    @property
    def name(self) -> str:
        """`worker 1`, for sentences."""
        return f"{self.role} {self.global_rank}"

    @property
    def is_alive(self) -> bool:
        """Whether it is starting or running."""
        return self.exit_code is None


class Handle(Protocol):
    """The processes of one run."""

    members: list[Member]

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell."""

    def collect(self) -> list[Member]:
        """The members that were started or have ended since the last call. Never waits.

        Who has ended is reaped: nothing of it can touch shared memory any more. Raises LaunchError where
        processes cannot be started, or the engine itself has failed.
        """

    def add(self, world: World) -> Member:
        """Start one more process."""

    def signal(self, member: Member, signum: int) -> None:
        """Send a signal to a member, if it still lives."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until every member has ended; whether that came true in time."""

    def last_output(self, member: Member) -> str:
        """The end of what it printed."""

    def close(self) -> None:
        """End whatever still runs, at once, and leave nothing behind."""


class Engine(Protocol):
    """Starts the processes of a job."""

    def start(self, job: Job, worlds: Sequence[World]) -> Handle:
        """Start one process for each of `worlds`; they run when `collect` says so."""
