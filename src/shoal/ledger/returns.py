"""Clients that nobody waits for: in which order they come back, and from how old a model each began.

The clock is a made-up one, so that all of it follows from the seed: each client has a pace of its own, drawn
once, and is back that long after it has begun. So many train at a time. Whoever is back is one of the next merge,
and another begins from what was merged last; when enough are back, all of them are merged. Who has taken so long
that too much was merged meanwhile is given up, as a client that was lost.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from shoal.ledger.order import mix
from shoal.spec.clients import ClientRounds

_PACE, _NEXT = range(121, 123)  # tell the random numbers of one run apart


class Returned(NamedTuple):
    """One of a merge."""

    client: int
    age: int
    """How often was merged since it began."""


class _Training(NamedTuple):
    """A client that is under way; the one that is back first sorts first."""

    back_at: float
    number: int
    client: int
    since: int
    """After so many merges it began."""


class Returns:
    """By merge, who came back. Asked for in any order; worked out one after the other, once."""

    def __init__(self, rounds: ClientRounds, seed: int) -> None:
        self._rounds, self._seed = rounds, seed
        self._paces = np.random.default_rng(mix(seed, _PACE)).lognormal(size=rounds.count).tolist()
        self._idle = list(range(rounds.count))
        self._training: list[_Training] = []
        self._begun, self._now = 0, 0.0
        self._merges: list[list[Returned]] = []
        self._ages = [0]
        """The sum of all ages, by how many merges."""

    def of(self, number: int) -> list[Returned]:
        """Those of a merge, counted from 0, in the order in which they came."""
        while len(self._merges) <= number:
            self._merges.append(self._next())
        return self._merges[number]

    def mean_age(self, merges: int) -> float:
        """Over all who were in the first so many merges."""
        if not merges:
            return 0.0
        self.of(merges - 1)
        return self._ages[merges] / (merges * self._rounds.per_round)

    def _next(self) -> list[Returned]:
        number, back = len(self._merges), list[Returned]()
        self._give_up(number)
        while len(back) < self._rounds.per_round:
            while self._idle and len(self._training) < self._rounds.at_a_time:
                self._begin(number)
            first = heapq.heappop(self._training)
            self._now = first.back_at
            back.append(Returned(first.client, number - first.since))
        self._idle = sorted([*self._idle, *(each.client for each in back)])
        self._ages.append(self._ages[-1] + sum(each.age for each in back))
        return back

    def _give_up(self, number: int) -> None:
        """Leave out who would be older than anybody may be."""
        late = [each for each in self._training if number - each.since > self._rounds.oldest]
        self._training = [each for each in self._training if each not in late]
        heapq.heapify(self._training)
        self._idle = sorted([*self._idle, *(each.client for each in late)])

    def _begin(self, number: int) -> None:
        client = self._idle.pop(mix(self._seed, self._begun, _NEXT) % len(self._idle))
        heapq.heappush(self._training, _Training(self._now + self._paces[client], self._begun, client, number))
        self._begun += 1
