"""Places that come to a worker or leave it while it trains, as the supervisor orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.comm.words import Adopt, Redeal, Release
from shoal.observe.happenings import Adopted, Released
from shoal.spec import World

ADOPT, RELEASE, REDEAL = Adopt.kind_name, Release.kind_name, Redeal.kind_name


class PlacesMoved(Exception):
    """Raised out of a wait for others: what this process waits for is its own to do now.

    Nothing is lost by it. Every phase of a step, and every row of a table, is skipped where it is done.
    """


@dataclass(frozen=True, kw_only=True)
class MoveOrder:
    """Places that this process is to do the work of, or no longer."""

    kind: str
    """`adopt`, `redeal`: at once, also in the middle of a step; `release`: at the next border between steps."""
    places: tuple[int, ...]
    generation: int
    redeal: Redeal | None = None
    """Where all places are dealt anew: over whom."""

    @classmethod
    def of(cls, word: Adopt | Release | Redeal) -> MoveOrder:
        """The order that the supervisor sent."""
        redeal = word if isinstance(word, Redeal) else None
        places = word.deal[word.member] if isinstance(word, Redeal) else word.places
        return cls(kind=word.kind_name, places=tuple(places), generation=word.generation, redeal=redeal)

    @property
    def answer(self) -> Adopted | Released:
        """What to tell the supervisor once it is done."""
        done: type[Adopted | Released] = Released if self.kind == RELEASE else Adopted
        return done(places=list(self.places), generation=self.generation)

    def applied_to(self, world: World) -> World | None:
        """Where this process stands afterwards; None where no place is left to it."""
        if self.redeal is not None:
            order = self.redeal
            return world.redealt(order.deal, order.hosts, order.member, self.generation, order.torn or ())
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
        return any(order.kind != RELEASE for order in self.open)

    def take(self, *, at_border: bool) -> Iterable[MoveOrder]:
        """The orders whose time has come, in turn; inside a step those that add places. Of several deals the last
        one counts: nobody is met any more by those before."""
        due = [order for order in self.open if at_border or order.kind != RELEASE]
        self.open = [order for order in self.open if order not in due]
        deals = [order for order in due if order.redeal is not None]
        return [order for order in due if order not in deals[:-1]]
