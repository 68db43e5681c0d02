"""The contract of a succession: what becomes of a run whose members come and go."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.launch.crew import Crew, Hand
from shoal.launch.messages import Load, Output, ScaleRequest
from shoal.launch.verdict import Failure
from shoal.spec import Job, World


class Bridge(Protocol):
    """What the supervisor's machine lets its parts see and do."""

    job: Job
    crew: Crew
    now: float
    """The time, on a clock that never goes back."""
    first_place: World
    """The first of the places that the run began with."""
    is_stopping: bool
    """The user has asked the run to end."""
    results: dict[str, Any]
    """What the run came to; the first worker's results, and what a succession adds."""

    @property
    def has_failed(self) -> bool:
        """Whether the run is ending because something failed."""

    def ask(self, output: Output) -> None:
        """Let this be done, after all that was asked before."""

    def emit(self, kind: str, global_rank: int | None, values: dict[str, Any]) -> None:
        """Tell whoever watches."""

    def start(self, place: World) -> Hand:
        """Start one more process."""

    def say(self, hand: Hand, message: dict[str, Any]) -> None:
        """Say something to a process; where it has ended meanwhile, that is about to be told."""

    def signal(self, hand: Hand, signum: int) -> None:
        """Send a signal to a process."""

    def answer(self, request: ScaleRequest, text: str, **facts: Any) -> None:
        """What was asked for is done, or will be."""

    def refuse(self, request: ScaleRequest, text: str) -> None:
        """What was asked for will not be done, for this reason."""

    def explain(self, hand: Hand) -> str:
        """One sentence about a process that has ended without a word of its own."""

    def failure_of(self, hand: Hand, message: str) -> Failure:
        """The end of this process as a failure of the run."""

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

    def hear(self, hand: Hand, kind: str, values: dict[str, Any]) -> None:
        """A process has said something. What workers say is told to those who watch after this."""

    def hear_failure(self, hand: Hand, failure: Failure) -> None:
        """A process has said why it cannot go on."""

    def notice_end(self, hand: Hand) -> None:
        """A process has ended, and its last words have been heard."""

    def scale(self, request: ScaleRequest) -> None:
        """The user asks for more or fewer processes, or how many there are."""

    def hear_load(self, load: Load) -> None:
        """What else the machine does, where this has been asked."""
