"""What a worker has computed and pushed, until every shard has acknowledged it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.comm.codec import Frame
from shoal.ps.messages import Push


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A push, as far as it is the same for every shard; its fields are those of `Push`."""

    clock: int
    cells: Sequence[int]
    weight: float
    loss: float
    scaled: bool = True
    scale: float = 1.0
    place: int = 0
    half: Sequence[float] = ()
    found: Sequence[float] = ()

    def for_shard(
        self,
        shard: int,
        *,
        origin: int,
        rank: int,
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
            rank=rank,
            clock=self.clock,
            cells=list(self.cells),
            based_on=based_on,
            weight=self.weight,
            loss=self.loss,
            scaled=self.scaled,
            scale=self.scale,
            place=self.place,
            half=list(self.half),
            found=list(self.found),
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
