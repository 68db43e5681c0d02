"""The crew: what the supervisor knows about each process, and about all of them together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.launch.engine import Member
from shoal.launch.verdict import Failure


@dataclass
class Hand:
    """One process as the supervisor sees it."""

    member: Member
    heard_at: float
    """When it last gave a sign of life."""
    state: str = "starting"
    is_done: bool = False
    has_reported_failure: bool = False
    silent_for_s: float | None = None
    """Set when it was ended because it had said nothing for so long."""
    succeeds: Vacancy | None = None
    """The worker's place that a spare has been given and not yet spoken from."""
    follows_loss_at: float | None = None
    """When the process was lost whose place it was started for; None once it is ready."""
    dismissed_at: float | None = None
    """When it was asked to end, before the others."""
    is_overdue: bool = False
    """It did not end in time when asked, and was killed."""
    complaint: str = ""
    """What it last said about a peer that it could not do without."""

    @property
    def is_worker(self) -> bool:
        """Whether it trains; others wait, or serve."""
        return self.member.role == "worker"


@dataclass(frozen=True)
class Vacancy:
    """A worker's place that waits for a spare."""

    global_rank: int
    lost_at: float
    failure: Failure
    """What to tell if no spare can be had."""
    spare: int = -1
    """The number of the spare that took the place."""


@dataclass
class Crew:
    """All processes that a run has had."""

    hands: list[Hand] = field(default_factory=list)
    vacancies: list[Vacancy] = field(default_factory=list)
    generation: int = 0
    top_step: int = 0
    fruitless_losses: int = 0
    """Processes lost since the last step forward."""

    def living(self, *roles: str) -> Iterator[Hand]:
        """The processes of these roles that are starting or running; without any, of all roles."""
        return (one for one in self.hands if one.member.is_alive and (not roles or one.member.role in roles))

    def hand_of(self, member: Member) -> Hand:
        """What is known about this process."""
        return next(one for one in self.hands if one.member is member)

    def ready_spare(self) -> Hand | None:
        """A spare that can take a place now."""
        return next((one for one in self.living("spare") if one.state == "ready"), None)

    def all_ready(self) -> bool:
        """Whether every worker that lives has come as far as `ready`."""
        return all(one.state != "starting" for one in self.living("worker"))

    def note_life(self, hand: Hand, message: dict[str, Any], now: float) -> None:
        """It has said something: it lives, and perhaps the run has come further."""
        hand.heard_at = now
        if message.get("kind") == "state":
            hand.state = message["state"]
        if (step := message.get("step", 0)) > self.top_step:
            self.top_step, self.fruitless_losses = step, 0

    def silent(self, now: float, timeout_s: float) -> list[Hand]:
        """Started processes that have said nothing for too long and have not been dealt with."""
        return [one for one in self._watched() if now - one.heard_at >= timeout_s]

    def next_silence(self, timeout_s: float) -> float | None:
        """When the next one will have been silent for too long, if none of them speaks."""
        return min((one.heard_at + timeout_s for one in self._watched()), default=None)

    def _watched(self) -> Iterator[Hand]:
        return (
            one
            for one in self.hands
            if one.member.is_alive and one.member.pid is not None and one.silent_for_s is None
        )
