"""The crew: what the supervisor knows about each process, and about all of them together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.launch.hangs import Life, step_of
from shoal.launch.messages import Ended
from shoal.observe.happenings import Done, StateEntered, StepsTaken
from shoal.spec import World
from shoal.spec.told import Told
from shoal.spec.vocabulary import Role, State


@dataclass(eq=False)
class Hand:
    """One process as the supervisor sees it."""

    number: int
    """What its host calls it; never used twice in a run."""
    role: Role
    global_rank: int
    """A worker's rank; of any other role its number, until a spare takes a worker's place."""
    life: Life
    node: int = 0
    """Its own number among all processes that a job with servers ever had."""
    host: int = 0
    """The number of the host that it is on."""
    world: World = field(default_factory=World)
    """Where it stood when it was started."""
    places: tuple[int, ...] = ()
    """The ranks whose work a worker does; its own is the lowest of them."""
    is_started: bool = False
    end: Ended | None = None
    """How it ended; None while it is starting or running."""
    state: State = State.STARTING
    is_done: bool = False
    has_reported_failure: bool = False
    is_deaf: bool = False
    """It reads nothing of what it is told."""
    hang: str = ""
    """Set when it was ended because it hung: how that showed, and where it was."""
    succeeds: list[Vacancy] = field(default_factory=list)
    """What it has been given in place of others, and not yet spoken from."""
    unconfirmed: set[int] = field(default_factory=set)
    """Places that it has been given and perhaps does not know of yet."""
    follows_loss_at: float | None = None
    """When the process was lost whose place it was started for; None once it is ready."""
    dismissed_at: float | None = None
    """When it was asked to end, before the others."""
    is_overdue: bool = False
    """It did not end in time when asked, and was killed."""
    was_garbled: bool = False
    """It has said something that could not be understood, and that was told."""
    complaint: str = ""
    """What it last said about a peer that it could not do without."""

    @property
    def name(self) -> str:
        """`worker 1`, for sentences."""
        return f"{self.role} {self.global_rank}"

    @property
    def is_alive(self) -> bool:
        """Whether it is starting or running."""
        return self.end is None

    @property
    def is_worker(self) -> bool:
        """Whether it trains; others wait, or serve."""
        return self.role == Role.WORKER

    @property
    def is_of_lost_host(self) -> bool:
        """Whether it has ended with all else on its host."""
        return self.end is not None and bool(self.end.lost_host)

    @property
    def rank(self) -> int | None:
        """A worker's rank; None for others, whom events about ranks are not about."""
        return self.global_rank if self.is_worker else None

    @property
    def exit_code(self) -> int:
        """How it ended, once it has; negative for the signal that ended it."""
        assert self.end is not None
        return self.end.exit_code


@dataclass(frozen=True)
class Vacancy:
    """Places whose host is gone."""

    places: tuple[int, ...]
    lost_at: float
    spare: int | None = None
    """The number of the waiting spare that took them, where one did."""
    adopter: int | None = None
    """The rank of the worker that took them besides its own, where one did."""


@dataclass
class Crew:
    """All processes that a run has had."""

    hands: list[Hand] = field(default_factory=list)
    vacancies: list[Vacancy] = field(default_factory=list)
    generation: int = 0
    top_step: int = 0
    fruitless_losses: int = 0
    """Processes lost since the last step forward."""
    last_loss: float | None = None
    """The latest that was told; None before the first."""

    def welcome(self, world: World, now: float) -> Hand:
        """A process is about to be started that stands here."""
        places = world.places or ((world.global_rank,) if world.role == Role.WORKER else ())
        hand = Hand(
            len(self.hands), world.role, world.global_rank, Life(now), world.node, world.host_number, world, places
        )
        self.hands.append(hand)
        return hand

    def living(self, *roles: Role) -> Iterator[Hand]:
        """The processes of these roles that are starting or running; without any, of all roles."""
        return (one for one in self.hands if one.is_alive and (not roles or one.role in roles))

    def ready_spare(self) -> Hand | None:
        """A spare that can take a place now."""
        return next((one for one in self.living(Role.SPARE) if one.state == State.READY), None)

    def all_ready(self) -> bool:
        """Whether every worker that lives has come as far as `ready`."""
        return all(one.state != State.STARTING for one in self.living(Role.WORKER))

    def note_life(self, hand: Hand, word: Told, now: float) -> None:
        """It has said something: it lives, and perhaps the run has come further."""
        hand.life.hear(word, now)
        step = step_of(word) or 0
        match word:
            case StateEntered(state=state):
                hand.state = state
            case StepsTaken(steps=[*_, [step, _]] as steps):
                known = (loss for _, loss in reversed(steps) if loss is not None)
                self.last_loss = next(known, self.last_loss)
            case Done(results={"loss": loss}) if self.last_loss is None:
                self.last_loss = loss  # the first worker was so late that others did all the steps
        self.note_progress(step)

    def note_progress(self, step: int) -> None:
        """The run has come so far."""
        if step > self.top_step:
            self.top_step, self.fruitless_losses = step, 0

    def watched(self) -> list[Hand]:
        """Started processes that are not known to hang."""
        return [one for one in self.living() if one.is_started and not one.hang]
