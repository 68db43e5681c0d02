"""What a worker knows of one shard, and what it waits for from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shoal.ps.messages import Ack, Clocks, Hello, PsMessage, Pull, Push, ShardView, Values


@dataclass(kw_only=True)
class ShardLink:
    """One shard, seen from a worker."""

    holders: ShardView | None = None
    known: bool = False
    """Its primary has said how far it is."""
    version: int = 0
    floor: int = 0
    rounds: int = 0
    yours: int = 0
    """The clock that it has of this worker's rank, as far as it has told."""
    seen: int = 0
    """How many cells its values have seen, as far as it has told."""
    loss: float = 0.0
    """Of the last gathered round, as the two below."""
    half: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    unacked: dict[int, Push] = field(default_factory=dict)
    """By sequence, in order."""
    due: float = 0.0
    """When to ask or to push again."""
    ticket: int = 0
    """The pull that was asked for last."""
    wants_whole: bool = False
    parts: dict[int, Values] = field(default_factory=dict)

    @property
    def pulled(self) -> list[Values] | None:
        """The parts of the last pull, in order; None until all have come."""
        if not self.parts or len(self.parts) < next(iter(self.parts.values())).parts:
            return None
        return [self.parts[number] for number in sorted(self.parts)]

    def knows(self, generation: int) -> bool:
        """Whether it is known here who held the shard in that generation: it is no newer than the view."""
        return self.holders is not None and generation <= self.holders.generation

    def advance(self, news: Ack | Clocks) -> None:
        """Take in how far the shard is. Servers tell only what cannot be undone, so what is further is newer."""
        self.version = max(self.version, news.version)
        self.floor = max(self.floor, news.floor)
        if news.rounds >= self.rounds:
            self.rounds, self.loss = news.rounds, news.loss
            self.half, self.found = news.half, news.found

    def take_part(self, part: Values) -> None:
        """Keep a part of the answer to a pull."""
        # An answer that was asked for twice may come in two versions: one of them has to be complete.
        if any(other.version != part.version for other in self.parts.values()):
            self.parts = {}
        self.parts[part.part] = part

    def unanswered(self, shard: int, rank: int) -> Iterator[PsMessage]:
        """What to say to the shard's primary, in its present generation, because nothing has answered it."""
        if self.holders is None:
            return
        generation = self.holders.generation
        self.unacked = {
            sequence: push if push.generation == generation else replace(push, generation=generation)
            for sequence, push in self.unacked.items()
        }
        yield from self.unacked.values()
        if self.ticket and self.pulled is None:
            yield Pull(shard=shard, generation=generation, ticket=self.ticket, whole=self.wants_whole)
        if not self.unacked:
            yield Hello(shard=shard, generation=generation, rank=rank)
