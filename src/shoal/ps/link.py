"""What a worker knows of its shards, and what it has pushed to them until every one has acknowledged it; how long
an answer is waited for before the same is said again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.comm.codec import Frame
from shoal.ps.messages import Ack, Clocks, Hello, PsMessage, Pull, Push, ShardView, Values

_MARGIN = 2.0
"""So many times what answers take is waited for."""
_FADES = 0.75
"""What a slow answer has taught counts so much less with each one that follows."""
_SLOW = 10e6
"""Bytes a second: a link that nothing is known of is thought to be no slower."""
_MOST_S = 8.0
"""Doubling ends here: a link that was cut and has healed is not left unused for long."""


class AnswerPatience:
    """Longer than answers take; where much is on its way, twice as long each time that it was in vain.

    A stream loses nothing while it holds. What is said again because its answer is slow comes on top of what the
    other side has not worked off yet, and makes the answer slower still: with shards of many megabytes, or over a
    slow link, for ever. Where little is on its way, saying it again costs nothing, and is done at once.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s = self._bulk_s = 0.0
        self._in_vain = 0
        self._since: float | None = None
        self._is_repeated = False

    def begin(self, now: float, nbytes: int) -> float:
        """Something is said, and so many bytes are on their way; when to say it again, unless an answer comes."""
        self._bulk_s = nbytes / _SLOW
        if self._since is None:
            self._since = now
        return now + self._wait_s

    def note_vain(self) -> None:
        """No answer has come: it is said again."""
        self._in_vain += 1
        self._is_repeated = True

    def answer(self, now: float, *, is_last: bool = True) -> float:
        """An answer has come; when to say again what has none yet."""
        # Which of several questions it answers cannot be told: it says nothing about how long answers take.
        if self._since is not None and not self._is_repeated:
            self._usual_s = max(now - self._since, _FADES * self._usual_s)
            self._in_vain = 0
        self._since = None if is_last else now
        self._is_repeated = False
        return now + self._wait_s

    def begin_anew(self) -> None:
        """Somebody else is to answer from now on: the wait so far says nothing about that one."""
        self._since, self._in_vain, self._is_repeated = None, 0, False

    @property
    def _wait_s(self) -> float:
        bulk_s = min(self._bulk_s * 2 ** min(self._in_vain, 30), max(self._bulk_s, _MOST_S))
        return max(self._least_s + bulk_s, _MARGIN * self._usual_s)


def size_of(message: PsMessage) -> int:
    """Bytes of its bulk."""
    return sum(len(frame) if isinstance(frame, bytes | bytearray) else frame.nbytes for frame in message.frames)


@dataclass(kw_only=True)
class ShardLink:
    """One shard, seen from a worker, and what it waits for from it."""

    holders: ShardView | None = None
    known: bool = False
    """Its primary has said how far it is."""
    version: int = 0
    floor: int = 0
    rounds: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    """Those that it has of every slot, or of every rank where cells are leased, as far as it has told."""
    is_current: bool = False
    """It has told them since this worker last got a slot."""
    seen: int = 0
    """How many cells its values have seen, as far as it has told."""
    loss: float = 0.0
    """Of the last gathered round, as the three below."""
    half: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    loss_parts: list[float] = field(default_factory=list)
    unacked: dict[int, Push] = field(default_factory=dict)
    """By sequence, in order."""
    due: float = 0.0
    """When to ask or to push again."""
    patience: AnswerPatience
    """With pushes and pulls: they are large."""
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

    @property
    def is_awaited(self) -> bool:
        """Whether something was pushed or asked for that it has not answered."""
        return bool(self.unacked) or (self.ticket > 0 and self.pulled is None)

    def knows(self, generation: int) -> bool:
        """Whether it is known here who held the shard in that generation: it is no newer than the view."""
        return self.holders is not None and generation <= self.holders.generation

    def advance(self, news: Ack | Clocks) -> None:
        """Take in how far the shard is. Servers tell only what cannot be undone, so what is further is newer."""
        self.version = max(self.version, news.version)
        self.floor = max(self.floor, news.floor)
        if news.rounds >= self.rounds:
            self.rounds, self.loss = news.rounds, news.loss
            self.half, self.found, self.loss_parts = news.half, news.found, news.loss_parts

    def take_part(self, part: Values) -> None:
        """Keep a part of the answer to a pull."""
        # An answer that was asked for twice may come in two versions: one of them has to be complete.
        if any(other.version != part.version for other in self.parts.values()):
            self.parts = {}
        self.parts[part.part] = part

    def unanswered(self, shard: int) -> Iterator[PsMessage]:
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
            yield self.pull(shard)
        if not self.unacked:
            yield Hello(shard=shard, generation=generation)

    def pull(self, shard: int) -> Pull:
        """Asks for the values that are wanted."""
        generation = self.holders.generation if self.holders else 0
        return Pull(shard=shard, generation=generation, ticket=self.ticket, whole=self.wants_whole)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A push, as far as it is the same for every shard; its fields are those of `Push`."""

    clock_of: int
    clock: int
    cells: Sequence[int]
    weight: float
    loss: float
    scaled: bool = True
    scale: float = 1.0
    buffer: int = 0
    half: Sequence[float] = ()
    found: Sequence[float] = ()
    loss_parts: Sequence[float] = ()

    def for_shard(
        self,
        shard: int,
        *,
        origin: int,
        sequence: int,
        generation: int,
        based_on: int,
        frames: Sequence[Frame],
    ) -> Push:
        """What one shard is sent of it."""
        return Push(
            shard=shard,
            generation=generation,
            origin=origin,
            sequence=sequence,
            clock_of=self.clock_of,
            clock=self.clock,
            cells=list(self.cells),
            based_on=based_on,
            weight=self.weight,
            loss=self.loss,
            scaled=self.scaled,
            scale=self.scale,
            buffer=self.buffer,
            half=list(self.half),
            found=list(self.found),
            loss_parts=list(self.loss_parts),
            frames=tuple(frames),
        )


class Offers:
    """By sequence, from 1: the offers that not every one of so many shards has."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._last = 0
        self._open: dict[int, Offer] = {}
        self._unsent: dict[int, set[int]] = {}
        """The shards that are still to come, of those that have any."""
        self._overlapping: set[int] = set()
        """Those that a shard could not take because it has some of their cells."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._open

    def __getitem__(self, sequence: int) -> Offer:
        return self._open[sequence]

    def open(self, offer: Offer) -> int:
        """Name an offer."""
        self._last += 1
        self._open[self._last] = offer
        self._unsent[self._last] = set(range(self._num_shards))
        return self._last

    def note_sent(self, sequence: int, shard: int) -> None:
        """A shard's part has gone out."""
        self._unsent[sequence].discard(shard)
        if not self._unsent[sequence]:
            del self._unsent[sequence]

    def unsent(self, sequence: int) -> Collection[int]:
        """The shards that an offer has not gone to yet."""
        return sorted(self._unsent.get(sequence, ()))

    def note_overlap(self, sequence: int) -> None:
        """A shard could not take it: it has some of the cells."""
        self._overlapping.add(sequence)

    def close(self, sequence: int) -> tuple[Sequence[int], bool]:
        """Every shard has answered; its cells, and whether they are to be done again, one by one."""
        overlaps = sequence in self._overlapping
        self._overlapping.discard(sequence)
        return self._open.pop(sequence).cells, overlaps
