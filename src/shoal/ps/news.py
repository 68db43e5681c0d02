"""What a primary says of its shard: how far it is, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.ps.between_servers import Fill
from shoal.ps.messages import Ack, Clocks, Pull, Push, PushOutcome, Values
from shoal.ps.shard import Shard


class News:
    """One shard's state as messages of a generation."""

    def __init__(self, number: int, shard: Shard) -> None:
        self._number = number
        self._shard = shard

    def ack(self, generation: int, push: Push, outcome: PushOutcome) -> Ack:
        """What became of a push."""
        return Ack(
            shard=self._number,
            generation=generation,
            sequence=push.sequence,
            outcome=outcome.value,
            version=self._shard.version,
            floor=self._shard.floor,
            rounds=self._shard.rounds,
            loss=self._shard.loss,
            half=self._shard.half,
            found=self._shard.found,
            loss_parts=self._shard.loss_parts,
        )

    def clocks(self, generation: int, *, whole: bool = True) -> Clocks:
        """How far the shard is, for a worker; `whole`: and everybody in it."""
        return Clocks(
            shard=self._number,
            generation=generation,
            version=self._shard.version,
            floor=self._shard.floor,
            rounds=self._shard.rounds,
            clocks=dict(self._shard.clocks) if whole else {},
            seen=len(self._shard.cells),
            loss=self._shard.loss,
            half=self._shard.half,
            found=self._shard.found,
            loss_parts=self._shard.loss_parts,
        )

    def values(self, generation: int, pull: Pull) -> Iterator[Values]:
        """The values as they are, part by part."""
        parts = list(self._shard.values.parts(whole=pull.whole))
        for part, frames in enumerate(parts):
            yield Values(
                shard=self._number,
                generation=generation,
                ticket=pull.ticket,
                version=self._shard.version,
                part=part,
                parts=len(parts),
                frames=tuple(frames),
            )

    def fill(self, generation: int) -> Fill:
        """All of the shard, for a new backup."""
        frames, books = self._shard.books(bulk=self._shard.values.frames())
        index = self._shard.index
        return Fill(shard=self._number, generation=generation, index=index, books=books, frames=frames)
