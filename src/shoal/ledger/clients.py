"""The order in which clients that are simulated in turn take samples, each of its own alone.

All of it follows from the seed: which samples are whose, who trains in which round, and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.ledger.order import EpochOrder, mix
from shoal.ledger.returns import Returns
from shoal.ledger.samplers import shuffled
from shoal.spec.clients import ClientRounds

_SPLIT, _CHOICE, _PASS, _SHARES, _HELD = range(111, 116)  # tell the random numbers of one run apart


def split_evenly(count: int, clients: int, seed: int) -> list[np.ndarray]:
    """So many samples, shuffled and dealt out: each client's own."""
    return [np.sort(part) for part in np.array_split(shuffled(mix(seed, _SPLIT), count), clients)]


def split_by_label(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Of each label, every client gets a share that is drawn from a Dirichlet distribution: the smaller alpha, the
    fewer labels a client has. Nobody is left without a sample."""
    chance = np.random.default_rng(mix(seed, _SHARES))
    found: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        those = np.flatnonzero(labels == label)
        those = those[shuffled(mix(seed, _SPLIT, int(label)), len(those))]
        ends = (np.cumsum(chance.dirichlet(np.full(clients, alpha))) * len(those)).round().astype(int)
        for own, part in zip(found, np.split(those, ends[:-1]), strict=True):
            own.append(part)
    parts = [np.sort(np.concatenate(own)) for own in found]
    for poor in (number for number, part in enumerate(parts) if not len(part)):
        rich = max(range(clients), key=lambda number: len(parts[number]))
        parts[poor], parts[rich] = parts[rich][-1:], parts[rich][:-1]
    return parts


def hold_back(parts: Sequence[np.ndarray], share: float, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What each client trains on, and what it keeps: so large a share of its samples, one at least where it has
    two."""
    trained, held = [], []
    for client, part in enumerate(parts):
        count = min(max(round(share * len(part)), share > 0), len(part) - 1)
        chosen = shuffled(mix(seed, client, _HELD), len(part))
        held.append(np.sort(part[chosen[:count]]))
        trained.append(np.sort(part[chosen[count:]]))
    return trained, held


class Roster:
    """Which client trains when; `slots`: how many do at a time."""

    def __init__(self, rounds: ClientRounds, *, slots: int, seed: int) -> None:
        self._rounds, self._slots, self._seed = rounds, slots, seed
        self._returns = Returns(rounds, seed) if rounds.at_a_time else None
        self._known: tuple[int, np.ndarray] = (-1, np.empty(0))
        """A round, and who trains in it: asked for in every step."""

    def client(self, step: int, slot: int) -> int:
        """Who trains in this slot of a step, counted from 0."""
        number, position = self._position(step, slot)
        return int(self.chosen(number)[position])

    def age(self, step: int, slot: int) -> int:
        """How many rounds before this one that client has begun."""
        number, position = self._position(step, slot)
        return 0 if self._returns is None else self._returns.of(number)[position].age

    def mean_age(self, rounds: int) -> float:
        """Over all clients of the first so many rounds."""
        return 0.0 if self._returns is None else self._returns.mean_age(rounds)

    def _position(self, step: int, slot: int) -> tuple[int, int]:
        """The round, and how many clients come before this one in it."""
        number, within = divmod(step, self._rounds.steps)
        return number, within // self._rounds.every * self._slots + slot

    def chosen(self, number: int) -> np.ndarray:
        """The clients of a round."""
        if self._returns is not None:
            return np.array([each.client for each in self._returns.of(number)])
        known = self._known
        if known[0] != number:
            those = shuffled(mix(self._seed, number, _CHOICE), self._rounds.count)[: self._rounds.per_round]
            known = self._known = (number, those)
        return known[1]


class ClientOrder:
    """An epoch is as many whole batches as the data has; slots of a step are batches of as many clients."""

    def __init__(
        self, parts: Sequence[np.ndarray], rounds: ClientRounds, *, batch_size: int, slots: int, seed: int
    ) -> None:
        """`parts`: the samples of each client."""
        self._rounds = rounds
        self._parts, self.held = hold_back(parts, rounds.held, seed)
        """By client: what it is trained on, and what it is evaluated on."""
        self._known: tuple[int, dict[int, np.ndarray]] = (-1, {})
        """A round, and by client what it takes in that."""
        self._batch, self._slots, self._seed = batch_size, slots, seed
        self.roster = Roster(rounds, slots=slots, seed=seed)
        self.length = max(1, sum(map(len, self._parts)) // batch_size) * batch_size

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        own = self._batch // self._slots
        found, at = [np.empty(0, dtype=np.int64)], epoch * self.length + start
        end = epoch * self.length + stop
        while at < end:
            step, within = divmod(at, self._batch)
            slot, first = divmod(within, own)
            last = min(own, first + end - at)
            found.append(self._of_client(step, slot)[first:last])
            at += last - first
        return np.concatenate(found)

    def _of_client(self, step: int, slot: int) -> np.ndarray:
        """Its batch of this step."""
        number, own = step // self._rounds.steps, self._batch // self._slots
        # Threads may ask at the same time: what was found is used, not read again.
        known = self._known
        if known[0] != number:
            known = self._known = (number, {})
        client = self.roster.client(step, slot)
        if (taken := known[1].get(client)) is None:
            taken = known[1][client] = self._in_round(number, client, own * self._rounds.every)
        first = step % self._rounds.every * own
        return taken[first : first + own]

    def _in_round(self, number: int, client: int, count: int) -> np.ndarray:
        """So many of its own samples: as many passes over them as there are, each in an order of its own."""
        part = self._parts[client]
        passes = [
            part[shuffled(mix(self._seed, number, client, one, _PASS), len(part))]
            for one in range(-(-count // len(part)))
        ]
        return np.concatenate(passes)[:count]


def held_of(order: EpochOrder) -> Sequence[np.ndarray]:
    """By client: the samples that it is evaluated on; nothing where nobody has held any back."""
    held = order.held if isinstance(order, ClientOrder) else []
    return held if any(len(part) for part in held) else []
