"""What all have asked for, in an order that all agree on. Everybody hears the same and so decides alike; no I/O.

Processes come together in rounds. In each, everybody says what it newly wants; what all want by then is done, in
the order in which it was first asked for. A process enters a round as soon as it wants anything that is not done,
so nobody polls: whoever is not there yet is waited for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.horovod.requests import TensorRequest, disagreement

MOST_KNOWN = 4096
"""Requests that are told by number once they were told in full."""
BLOCKED_ROUNDS = 200
"""Rounds in which everybody waited for something that not all want, and nobody said anything new, before that
counts as a mistake. Rounds without news are a pause apart: this is about two seconds."""


@dataclass(frozen=True, kw_only=True)
class Saying:
    """What one process says in a round."""

    news: tuple[TensorRequest, ...] = ()
    waits_for: str = ""
    """The name that its script waits for, and does nothing else meanwhile; empty: it does something."""
    joins: bool = False
    """It has no more data: what others want is done without it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Something that is now done by all, or refused to all."""

    name: str
    wanted: dict[int, TensorRequest] = field(default_factory=dict)
    """By index; who has joined is not among them."""
    error: str = ""

    @property
    def request(self) -> TensorRequest:
        """That of the first who asked."""
        return next(iter(self.wanted.values()))


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What follows from a round."""

    decisions: tuple[Decision, ...] = ()
    last_joined: int | None = None
    """Who joined last, once all have."""
    is_quiet: bool = False
    """Nobody said anything new, and nothing could be done."""


class Negotiation:
    """One process's view of it, which is everybody's."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: by index, for sentences."""
        self._ranks = tuple(ranks)
        self._wanted: dict[str, dict[int, TensorRequest]] = {}
        self._joined: list[int] = []
        self._blocked_rounds = 0

    def missing(self) -> dict[str, tuple[int, ...]]:
        """What some want and others do not yet: the ranks of those others, by name."""
        return {
            name: tuple(rank for index, rank in enumerate(self._ranks) if index not in wanted)
            for name, wanted in self._wanted.items()
        }

    def take(self, sayings: Sequence[Saying]) -> RoundOutcome:
        """A round."""
        for index, saying in enumerate(sayings):
            for request in saying.news:
                self._wanted.setdefault(request.name, {})[index] = request
            if saying.joins and index not in self._joined:
                self._joined.append(index)
        decisions = tuple(self._decide())
        last_joined = None
        if len(self._joined) == len(self._ranks):
            last_joined, self._joined = self._joined[-1], []
        is_quiet = not decisions and last_joined is None and not any(saying.news for saying in sayings)
        if is_quiet and self._all_blocked(sayings):
            self._blocked_rounds += 1
            if self._blocked_rounds >= BLOCKED_ROUNDS:
                return RoundOutcome(decisions=tuple(self._refuse_all(sayings)))
        else:
            self._blocked_rounds = 0
        return RoundOutcome(decisions=decisions, last_joined=last_joined, is_quiet=is_quiet)

    def _decide(self) -> list[Decision]:
        ready = [
            name
            for name, wanted in self._wanted.items()
            if all(index in wanted or index in self._joined for index in range(len(self._ranks)))
        ]
        return [self._decision(name) for name in ready]

    def _decision(self, name: str) -> Decision:
        # In the order of ranks, so that all name the same two where they differ.
        wanted = dict(sorted(self._wanted.pop(name).items()))
        error = disagreement({self._ranks[index]: request for index, request in wanted.items()})
        return Decision(name=name, wanted=wanted, error=error or "")

    def _all_blocked(self, sayings: Sequence[Saying]) -> bool:
        """Whether everybody waits for what others have not asked for, so that nobody ever will."""
        return all(
            index in self._joined or index in self._wanted.get(saying.waits_for, ())
            for index, saying in enumerate(sayings)
        )

    def _refuse_all(self, sayings: Sequence[Saying]) -> list[Decision]:
        waits = [
            f"rank {rank} has joined" if index in self._joined else f"rank {rank} waits for {saying.waits_for!r}"
            for index, (rank, saying) in enumerate(zip(self._ranks, sayings, strict=True))
        ]
        error = (
            f"Ranks wait for different tensors: {', '.join(waits)}; let all ranks make the same calls in one "
            "order."
        )
        names, self._blocked_rounds = list(self._wanted), 0
        return [Decision(name=name, wanted=self._wanted.pop(name), error=error) for name in names]


class SayingCodec:
    """Sayings as text. What was told in full once is told by its number: all have heard it, so all count alike."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._known: list[TensorRequest] = []

    def write(self, saying: Saying) -> str:
        """One's own."""
        texts = [json.dumps(request.to_plain(), separators=(",", ":")) for request in saying.news]
        items: list[Any] = [self._numbers.get(text, text) for text in texts]
        return json.dumps([items, saying.waits_for, int(saying.joins)], separators=(",", ":"))

    def read(self, texts: Sequence[str]) -> list[Saying]:
        """Everybody's of one round, by index."""
        return [self._read(json.loads(text)) for text in texts]

    def _read(self, plain: list[Any]) -> Saying:
        items, waits_for, joins = plain
        return Saying(news=tuple(map(self._request, items)), waits_for=waits_for, joins=bool(joins))

    def _request(self, item: int | str) -> TensorRequest:
        if isinstance(item, int):
            return self._known[item]
        request = TensorRequest.from_plain(json.loads(item))
        if item not in self._numbers and len(self._known) < MOST_KNOWN:
            self._numbers[item] = len(self._known)
            self._known.append(request)
        return request
