"""Decisions that every shard has to take once, in order: kept until each has logged them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shoal.ps.messages import Control

PATIENCE_S = 0.5


class Controls:
    """Controls that are not yet in every shard's log.

    A shard ignores numbers below its last one, so each gets the next only when it has confirmed the one before.
    """

    def __init__(self, num_shards: int, number: int = 0, pending: Iterable[Sequence[Any]] = ()) -> None:
        self._num_shards = num_shards
        self._number = number
        self._pending: dict[int, tuple[str, dict[str, Any], set[int]]] = {
            number: (action, values, set(shards)) for number, action, values, shards in pending
        }
        self._sent_at: dict[int, float] = {}

    def plain(self) -> tuple[int, list[list[Any]]]:
        """The last number and what is pending, as plain data."""
        return self._number, [
            [number, action, values, sorted(shards)] for number, (action, values, shards) in self._pending.items()
        ]

    def issue(self, action: str, values: dict[str, Any]) -> int:
        """A new decision for every shard; its number."""
        self._number += 1
        self._pending[self._number] = (action, values, set(range(self._num_shards)))
        return self._number

    def confirm(self, shard: int, number: int) -> None:
        """A shard has logged it."""
        if number in self._pending:
            shards = self._pending[number][2]
            shards.discard(shard)
            self._sent_at.pop(shard, None)
            if not shards:
                del self._pending[number]

    def hurry(self) -> None:
        """Primaries have changed: tell them all again."""
        self._sent_at.clear()

    def due(self, term: int, now: float) -> Iterator[Control]:
        """What to send now: to each shard the first that it has not confirmed, again after a while."""
        for shard in range(self._num_shards):
            first = next((n for n, (_, _, shards) in self._pending.items() if shard in shards), None)
            if first is None or now - self._sent_at.get(shard, -PATIENCE_S) < PATIENCE_S:
                continue
            self._sent_at[shard] = now
            action, values, _ = self._pending[first]
            yield Control(shard=shard, term=term, number=first, action=action, values=values)
