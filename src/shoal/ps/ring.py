"""Whole copies that add up in a ring: partial sums go round once, then the total does.

Every shard hears only of the one before it, and tells only the one behind it. A part goes under the number of the
last shard that is in it: under that of the ring's last shard it is the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shoal.ps.between_servers import PartRequest, RoundPart, Settle
from shoal.ps.parts import add_up, due_now, fits, last_told, own_part, settle_with_sum
from shoal.ps.settlement import Tell
from shoal.ps.shard import Shard


class WorkerRing:
    """One shard's side of it, at its primary: as `AllToAll`, with fewer and larger steps."""

    def __init__(self, number: int, shard: Shard, tell: Tell, patience_s: float) -> None:
        self.due = float("inf")
        self.primaries: Sequence[int] = ()
        self.ignored: Counter[str] = Counter()
        self._number = number
        self._shard = shard
        self._tell = tell
        self._patience_s = patience_s
        self._heard: dict[int, RoundPart] = {}
        """By origin: what the shard before this one has told of the next round."""
        self._early: dict[int, RoundPart] = {}
        """The same of a later one: it is a round ahead, because what it told of this one was lost."""
        self._sum: RoundPart | None = None
        """Of the shards up to this one."""

    def on_part(self, part: RoundPart) -> None:
        if part.round < self._shard.next_round:
            return
        if part.origin in (self._before, self._last) and fits(self._shard, part):
            (self._heard if part.round == self._shard.next_round else self._early)[part.origin] = part
        else:
            self.ignored["malformed part"] += 1

    def on_request(self, sender: int, request: PartRequest) -> None:
        part = self._sum
        if request.round != self._shard.next_round:
            part = last_told(self._shard, self._last, request.round)
        if part is not None:
            self._tell(sender, replace(part, shard=request.origin))

    def close(self, now: float) -> Settle | None:
        if not self._shard.is_complete:
            return None
        self._heard.update(due_now(self._early, self._shard))
        if self._sum is None and (self._number == 0 or self._before in self._heard):
            before = [self._heard[self._before]] if self._number else []
            self._sum = add_up(self._shard, [*before, own_part(self._shard, self._number)])
            self._tell_next(self._sum)
        self.due = min(self.due, now + self._patience_s)
        total = self._sum if self._number == self._last else self._heard.get(self._last)
        if self._sum is None or total is None:
            return None
        if self._number != self._last and self._next != self._last:
            self._tell_next(total)
        if total is not self._sum:
            total = add_up(self._shard, [total])  # So it lies where a successor finds it.
        entry = settle_with_sum(self._shard, self._number, total, kept=total)
        self._heard, self._sum, self.due = {}, None, float("inf")
        return entry

    def repeat(self, now: float) -> None:
        if not self._shard.is_complete:
            self.due = float("inf")
            return
        self.due = now + self._patience_s
        request = PartRequest(shard=self._before, origin=self._number, round=self._shard.next_round)
        self._tell(self.primaries[self._before], request)

    def _tell_next(self, part: RoundPart) -> None:
        if len(self.primaries) > 1:
            self._tell(self.primaries[self._next], replace(part, shard=self._next))

    @property
    def _last(self) -> int:
        return len(self.primaries) - 1

    @property
    def _before(self) -> int:
        return (self._number - 1) % len(self.primaries)

    @property
    def _next(self) -> int:
        return (self._number + 1) % len(self.primaries)
