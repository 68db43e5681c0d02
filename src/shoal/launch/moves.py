"""Handing places from one process to another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shoal.comm.words import Adopt, Release, Stop, Takeover
from shoal.launch.crew import Hand, Vacancy
from shoal.launch.sharing import share_out
from shoal.launch.succession import Bridge
from shoal.launch.worlds import member_world
from shoal.spec.vocabulary import Role, State

_AT_WORK = (State.TRAINING, State.EVALUATING)


class PlaceMoves:
    """Gives places to processes and asks for them back. Each move begins a new generation.

    A place is free once its host has been reaped, or has said that it released it. What was given to a process
    counts as its own at once: whatever becomes of the message, the place is free again when the process ends.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._crew = bridge.crew
        self._num_spares = bridge.job.cluster.spares

    def hosts(self) -> list[Hand]:
        """The workers that have places and have not come to the end."""
        return [one for one in self._crew.living(Role.WORKER) if one.places and not one.is_done]

    def able_hosts(self) -> list[Hand]:
        """Those of them that look out for more: they take steps, and are not about to leave."""
        return [one for one in self.hosts() if one.state in _AT_WORK and one.dismissed_at is None]

    def start_spare(self) -> Hand:
        """Start one more process, which waits for places."""
        number, self._num_spares = self._num_spares, self._num_spares + 1
        world = member_world(self._bridge.first_world, Role.SPARE, number, generation=self._crew.generation)
        return self._bridge.start(world)

    def give(self, hand: Hand, places: Collection[int], vacancy: Vacancy | None = None) -> None:
        """Give places to a worker or a spare, in place of those that were lost."""
        order: type[Adopt | Takeover] = Adopt if hand.is_worker else Takeover
        self._crew.generation += 1
        self._bridge.say(hand, order(places=sorted(places), generation=self._crew.generation))
        if order is Takeover and self._bridge.is_stopping:
            self._bridge.say(hand, Stop())
        if vacancy is not None:
            hand.succeeds.append(replace(vacancy, places=tuple(sorted(places)), adopter=hand.rank))
        hand.unconfirmed |= set(places)
        self._settle(hand, {*hand.places, *places})

    def share_out(self, places: Collection[int], vacancy: Vacancy | None = None) -> list[int]:
        """Give places to the workers that there are; returns those for which there was none."""
        hosts = {one: one.places for one in self.able_hosts()}
        if not hosts:
            return list(places)
        for hand, given in share_out(tuple(places), hosts).items():
            self.give(hand, given, vacancy)
        return []

    def ask_back(self, hand: Hand, places: Collection[int]) -> None:
        """Ask a worker to release places after its step."""
        self._crew.generation += 1
        self._bridge.say(hand, Release(places=sorted(places), generation=self._crew.generation))

    def take_back(self, hand: Hand, places: Collection[int]) -> None:
        """A worker has released places."""
        self._settle(hand, set(hand.places) - set(places))

    def _settle(self, hand: Hand, places: set[int]) -> None:
        hand.places = tuple(sorted(places))
        if hand.places:
            hand.role, hand.global_rank = Role.WORKER, hand.places[0]
