"""Rounds that all shards close together: each needs to know something of every other before it may update.

A shard whose round is complete tells its part (the squared norms of its gradients) to all others, asks again for
those that do not come, and has what closes the round when all are here. A part follows from the round's pushes
alone, and is told only when they are safe: so it is the same whoever tells it, before a fail-over or after it.
No shard closes a round without every other's part of it, so none is more than one round ahead, and its part of
the last closed round is all that others may still ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from shoal.comm.codec import Frame
from shoal.ps.messages import Part, PartRequest, PsMessage, Settle
from shoal.ps.shard import Shard


class Settlement:
    """One shard's side of it, at its primary. What it keeps may be lost: others have it, or it follows anew."""

    def __init__(
        self, number: int, shard: Shard, tell: Callable[[int, PsMessage], None], patience_s: float
    ) -> None:
        self.due = float("inf")
        """When to ask again for what has not come."""
        self.primaries: Sequence[int] = ()
        """By shard: the node that speaks for it."""
        self.ignored: Counter[str] = Counter()
        self._number = number
        self._shard = shard
        self._tell = tell
        """Sends what the shard's present state says, once that state is safe."""
        self._patience_s = patience_s
        self._parts: dict[int, tuple[Frame, ...]] = {}
        """By shard: its part of the next round to be closed."""

    def on_part(self, part: Part) -> None:
        """Keep another shard's part; it may come before this shard's own round is complete."""
        if part.round != self._shard.next_round:
            return
        if part.origin == self._number or not self._shard.values.fits_part(part.origin, part.frames):
            self.ignored["malformed part"] += 1
            return
        self._parts[part.origin] = part.frames

    def on_request(self, sender: int, request: PartRequest) -> None:
        """Tell again what may not have arrived, where this shard knows it."""
        if request.round == self._shard.next_round:
            frames = self._parts.get(self._number)
        else:
            frames = self._shard.part_of(request.round)
        if frames is not None:
            self._tell(sender, self._part(request.origin, request.round, frames))

    def close(self, now: float) -> Settle | None:
        """What closes the round, if it is complete and all parts are here. The first time, ours is told."""
        if not self._shard.is_complete:
            return None
        if self._number not in self._parts:
            self._parts[self._number] = self._shard.make_part()
            self._announce(now)
        if len(self._parts) < len(self.primaries):
            return None
        factor = self._shard.values.combine(self._parts)
        entry = Settle(
            shard=self._number, round=self._shard.next_round, factor=factor, frames=self._parts[self._number]
        )
        self._parts, self.due = {}, float("inf")
        return entry

    def repeat(self, now: float) -> None:
        """Ask for the parts that this shard waits for."""
        if self._number not in self._parts:
            self.due = float("inf")
            return
        self.due = now + self._patience_s
        for shard, node in enumerate(self.primaries):
            if shard not in self._parts:
                self._tell(node, PartRequest(shard=shard, origin=self._number, round=self._shard.next_round))

    def _announce(self, now: float) -> None:
        self.due = now + self._patience_s
        for shard, node in enumerate(self.primaries):
            if shard != self._number:
                self._tell(node, self._part(shard, self._shard.next_round, self._parts[self._number]))

    def _part(self, addressee: int, number: int, frames: tuple[Frame, ...]) -> Part:
        return Part(shard=addressee, origin=self._number, round=number, frames=frames)
