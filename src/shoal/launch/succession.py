"""The contract of a succession: what becomes of a run whose members come and go."""

from __future__ import annotations

from typing import Protocol

from shoal.comm.words import ScaleAnswered
from shoal.launch.crew import Crew, Hand
from shoal.launch.messages import Load, Output, ScaleRequest
from shoal.launch.verdict import Failure
from shoal.observe.happenings import Happening
from shoal.observe.results import RunResults
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told


class Bridge(Protocol):
    """What the supervisor's machine lets its parts see and do."""

    job: Job
    crew: Crew
    now: float
    """The time, on a clock that never goes back."""
    first_world: World
    """The world of the first process that the run began with; of the coordinator, where there is one."""
    is_stopping: bool
    """The user has asked the run to end."""
    results: RunResults
    """What the run came to."""

    @property
    def has_failed(self) -> bool:
        """Whether the run is ending because something failed."""

    @property
    def is_parting(self) -> bool:
        """Whether the workers of several hosts have all come to the end, and need each other no more."""

    def ask(self, output: Output) -> None:
        """Let this be done, after all that was asked before."""

    def emit(self, what: Happening, rank: int | None = None) -> None:
        """Tell whoever watches."""

    def start(self, world: World, *, is_seated: bool = False) -> Hand:
        """Start one more process, where there is most room, or where its world says that it is."""

    def promote(self, hand: Hand, world: World) -> World:
        """Let a process that lives be what another was: `world`, as far as its host lets it."""

    def say(self, hand: Hand, word: Told) -> None:
        """Say something to a process; where it has ended meanwhile, that is about to be told."""

    def signal(self, hand: Hand, signum: int) -> None:
        """Send a signal to a process."""

    def answer(self, request: ScaleRequest, answer: ScaleAnswered) -> None:
        """Say what becomes of what was asked for."""

    def fail(self, failure: Failure) -> None:
        """Let the run fail."""


class Succession(Protocol):
    """Decides who follows whom, and when the run is over. A part of the supervisor's machine."""

    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""

    def act(self) -> None:
        """Do what is due."""

    def next_deadline(self) -> float | None:
        """When `act` must be called at the latest."""

    def hear(self, hand: Hand, word: Told) -> None:
        """A process has said something. What workers say is told to those who watch after this."""

    def hear_failure(self, hand: Hand, failure: Failure) -> None:
        """A process has said why it cannot go on."""

    def notice_end(self, hand: Hand) -> None:
        """A process has ended, and its last words have been heard."""

    def host_came(self, number: int, facts: HostFacts) -> None:
        """One more host is there, of this number."""

    def hosts_are(self, count: int, why: str) -> None:
        """So many hosts are there now."""

    def objection_to_hosts(self, more: int) -> str | None:
        """Why the run cannot have so many more hosts, or fewer where that is negative; None where it can."""

    def scale(self, request: ScaleRequest) -> None:
        """The user asks for more or fewer processes, or how many there are."""

    def hear_load(self, load: Load) -> None:
        """What else the machine does, where this has been asked."""
