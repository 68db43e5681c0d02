"""The hosts of a run: who goes where, and which are left. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shoal.launch.crew import Crew
from shoal.launch.worlds import meeting_point
from shoal.layout import Demand, seat_one
from shoal.spec import World
from shoal.spec.host_facts import HostFacts
from shoal.spec.vocabulary import Role


class Fleet:
    """What the supervisor knows of its hosts. A part of its machine."""

    def __init__(self, hosts: Sequence[HostFacts], demand: Demand) -> None:
        self.hosts = hosts
        """All that the run has had."""
        self.left = dict(enumerate(hosts))
        """Those that are there, by number."""
        self._is_spread = len(hosts) > 1
        self._demand = demand

    def lose(self, number: int) -> HostFacts | None:
        """A host is gone; None where that is known."""
        return self.left.pop(number, None)

    def add(self, host: HostFacts) -> int:
        """One more host is there; its number."""
        number = len(self.hosts)
        self.hosts = [*self.hosts, host]
        self.left[number] = host
        self._is_spread = True
        return number

    def seat(self, world: World, crew: Crew) -> World:
        """Where one more process goes: where it is least crowded."""
        is_at_home = world.role == Role.COORDINATOR and world.host_number in self.left
        if not self._is_spread or is_at_home:  # A coordinator is followed at the same address.
            return world
        held = Counter(hand.host for hand in crew.living(world.role))
        number = seat_one(self.left, held, world.role, self._demand)
        host = self.left[number]
        if world.role == Role.COORDINATOR:
            world = replace(world, coordinator=meeting_point(host))
        return world.at(number, host.address)
