"""Rounds that all shards close together: each needs to know something of every other before it may update.

A shard whose round is complete tells its part (squared norms, or a whole copy's sum) to all others, asks again for
those that do not come, and has what closes the round when all are here. A part follows from the round's pushes
alone, and is told only when they are safe: so it is the same whoever tells it, before a fail-over or after it.
No shard closes a round without every other's part of it, so none is more than one round ahead, and its part of
the last closed round is all that others may still ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from shoal.ps.between_servers import PartRequest, RoundPart, Settle
from shoal.ps.messages import PsMessage
from shoal.ps.parts import add_up, due_now, fits, last_told, own_part, settle_with_factor, settle_with_sum
from shoal.ps.shard import Shard

Tell = Callable[[int, PsMessage], None]
"""Sends what the shard's present state says, once that state is safe."""


class Settling(Protocol):
    """One shard's side of it, at its primary. What it keeps may be lost: others have it, or it follows anew."""

    due: float
    """When to ask again for what has not come."""
    primaries: Sequence[int]
    """By shard: the node that speaks for it."""

    def on_part(self, part: RoundPart) -> None:
        """Keep what another shard tells; it may come before this shard's own round is complete."""

    def on_request(self, sender: int, request: PartRequest) -> None:
        """Tell again what may not have arrived, where this shard knows it."""

    def close(self, now: float) -> Settle | None:
        """What closes the round, if it is complete and all that it takes is here. What is new here is told."""

    def repeat(self, now: float) -> None:
        """Ask for what this shard waits for."""


class AllToAll:
    """Every shard tells its part to every other."""

    def __init__(self, number: int, shard: Shard, tell: Tell, patience_s: float) -> None:
        self.due = float("inf")
        self.primaries: Sequence[int] = ()
        self.ignored: Counter[str] = Counter()
        self._number = number
        self._shard = shard
        self._tell = tell
        self._patience_s = patience_s
        self._parts: dict[int, RoundPart] = {}
        """By shard: its part of the next round to be closed."""
        self._early: dict[int, RoundPart] = {}
        """Of those that are a round ahead, because what they told of this one was lost. They tell it once."""

    def on_part(self, part: RoundPart) -> None:
        if part.round < self._shard.next_round:
            return
        if part.origin == self._number or not fits(self._shard, part):
            self.ignored["malformed part"] += 1
            return
        (self._parts if part.round == self._shard.next_round else self._early)[part.origin] = part

    def on_request(self, sender: int, request: PartRequest) -> None:
        if request.round == self._shard.next_round:
            part = self._parts.get(self._number)
        else:
            part = last_told(self._shard, self._number, request.round)
        if part is not None:
            self._tell(sender, replace(part, shard=request.origin))

    def close(self, now: float) -> Settle | None:
        if not self._shard.is_complete:
            return None
        self._parts.update(due_now(self._early, self._shard))
        if self._number not in self._parts:
            self._parts[self._number] = own_part(self._shard, self._number)
            self._announce(now)
        if len(self._parts) < len(self.primaries):
            return None
        own = self._parts[self._number]
        if self._shard.rules.adds_up:
            total = add_up(self._shard, [self._parts[origin] for origin in sorted(self._parts)])
            entry = settle_with_sum(self._shard, self._number, total, kept=own)
        else:
            entry = settle_with_factor(self._shard, self._number, self._parts)
        self._parts, self.due = {}, float("inf")
        return entry

    def repeat(self, now: float) -> None:
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
                self._tell(node, replace(self._parts[self._number], shard=shard))
