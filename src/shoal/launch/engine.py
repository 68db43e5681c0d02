"""The contracts of what runs processes: engines reserve hosts, a host starts processes and watches over them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from shoal.launch.messages import Load, News, Sight
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told


@runtime_checkable
class CopyKeeper(Protocol):
    """A host that may have a disk of its own, on which copies outlive the supervisor's machine."""

    @property
    def is_apart(self) -> bool:
        """Whether it has."""

    def keep_copy(self, checkpoint: Path) -> None:
        """Have a copy of this checkpoint there, soon."""


class Host(Protocol):
    """The processes of one run on one host, by the numbers that its supervisor gives them."""

    @property
    def facts(self) -> HostFacts:
        """What it is called, where it is reached, and what it has to give."""

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell."""

    def start(self, process: int, world: World) -> None:
        """Start a process; it runs when `collect` says so."""

    def collect(self) -> list[News]:
        """What has happened since the last call; of each process in order. Never waits.

        Raises LaunchError where processes cannot be started, or the host itself has failed or is gone; `start`
        does, too. A host that others can do without is lost then, with all of its processes.
        """

    def say(self, process: int, word: Told) -> None:
        """Say something to a process, if it still lives. Never waits, also where it does not read."""

    def signal(self, process: int, signum: int) -> None:
        """Send a signal to a process, if it still lives."""

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        """The stacks of these processes, as far as they can be had. Takes a moment."""

    def measure_load(self) -> Load:
        """What else this host does."""

    def close(self) -> None:
        """End whatever still runs, at once, and leave nothing behind."""


class Newcomers(Protocol):
    """Hosts that come to a run that goes on."""

    def fileno(self) -> int:
        """Readable, for a selector, when somebody calls."""

    def collect(self) -> Sequence[Host]:
        """Those that have come since the last call. Never waits."""

    def invite(self, count: int) -> None:
        """Have so many more come. LaunchError, in a sentence, where there are no others to be had."""

    def close(self) -> None:
        """Let nobody in any more."""


@runtime_checkable
class OpenEngine(Protocol):
    """An engine to whose runs hosts may come later, too, or come back."""

    def newcomers(self) -> Newcomers:
        """Of the run for which hosts were reserved last."""


class Engine(Protocol):
    """Where a job runs."""

    def reserve(self, job: Job) -> Sequence[Host]:
        """The hosts for the processes of this job; the first is the one that others meet at.

        LaunchError, in a sentence, where they cannot be had; nothing is left behind then.
        """
