"""Places that come to a worker or leave it while it trains, as the supervisor orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.comm.words import Adopt, Release
from shoal.observe.happenings import Adopted, Released
from shoal.spec import World

ADOPT, RELEASE = Adopt.kind_name, Release.kind_name


class PlacesMoved(Exception):
    """Raised out of a wait for others: what this process waits for is its own to do now.

    Nothing is lost by it. Every phase of a step, and every row of a table, is skipped where it is done.
    """


@dataclass(frozen=True, kw_only=True)
class MoveOrder:
    """Places that this process is to do the work of, or no longer."""

    kind: str
    """`adopt`: at once, also in the middle of a step; `release`: at the next border between steps."""
    places: tuple[int, ...]
    generation: int

    @classmethod
    def of(cls, word: Adopt | Release) -> MoveOrder:
        """The order that the supervisor sent."""
        return cls(kind=word.kind_name, places=tuple(word.places), generation=word.generation)

    @property
    def answer(self) -> Adopted | Released:
        """What to tell the supervisor once it is done."""
        done: type[Adopted | Released] = Adopted if self.kind == ADOPT else Released
        return done(places=list(self.places), generation=self.generation)

    def applied_to(self, world: World) -> World | None:
        """Where this process stands afterwards; None where no place is left to it."""
        moved = set(self.places)
        places = set(world.places) | moved if self.kind == ADOPT else set(world.places) - moved
        return world.hosting(places, self.generation) if places else None


class OrderBook:
    """Orders that have been heard and not yet carried out."""

    def __init__(self) -> None:
        self.open: list[MoveOrder] = []

    def add(self, order: MoveOrder) -> None:
        """Keep an order until its time comes."""
        self.open.append(order)

    @property
    def is_urgent(self) -> bool:
        """Whether others may be waiting for work that is to become this process's."""
        return any(order.kind == ADOPT for order in self.open)

    def take(self, *, at_border: bool) -> Iterable[MoveOrder]:
        """The orders whose time has come, in turn; inside a step those that add places."""
        due = [order for order in self.open if at_border or order.kind == ADOPT]
        self.open = [order for order in self.open if order not in due]
        return due
