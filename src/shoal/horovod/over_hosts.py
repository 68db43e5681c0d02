"""How processes of several hosts come together: memory inside each, and encrypted sockets between them.

Each process set has sockets of its own, because it has a thread of its own, and sockets are for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from shoal.arena import Segment
from shoal.comm.group import Group, HierarchicalGroup, LoneGroup, MemoryGroup
from shoal.comm.group.memory import Lookout
from shoal.comm.group.regions import group_regions
from shoal.comm.security import RunKey
from shoal.comm.tcp.pacing import cable_of
from shoal.comm.zmq_transport import ZmqTransport
from shoal.horovod.assembly import Circle
from shoal.horovod.letter_parley import LetterParley
from shoal.horovod.parley import GroupParley, Parley
from shoal.spec import World
from shoal.strategies.groups.over_hosts import ranks_by_host

Meet = Callable[[str], Mapping[int, str]]
"""Leaves a text for all processes, and returns everybody's, by rank."""


class HostsAssembly:
    """Of a run that `shoal run --on` has started."""

    def __init__(self, world: World, meet: Meet, on_idle: Callable[[], None]) -> None:
        """`world` has a fresh segment, which the processes of this host share."""
        self._world, self._meet, self._on_idle = world, meet, on_idle
        self._hosts = [list(ranks) for ranks in ranks_by_host(world.hosts)]
        self._own = next(ranks for ranks in self._hosts if world.global_rank in ranks)
        self._inside = self._open_inside()
        self._parley: Parley
        self._at_end = ExitStack()

    def all(self) -> Circle:
        group, self._parley = self._open(self._inside, self._hosts, self._meet)
        return group, self._parley

    def part(self, ranks: Sequence[int]) -> Circle | None:
        hosts = [part for host in self._hosts if (part := [rank for rank in host if rank in ranks])]
        is_member = self._world.global_rank in ranks
        inside = self._inside_part([rank for rank in self._own if rank in ranks])
        if len(hosts) == 1:
            return (inside, GroupParley(inside)) if is_member else None
        if is_member:
            return self._open(inside, hosts, self._hear_all)
        self._hear_all("")
        return None

    def close(self) -> None:
        self._at_end.close()

    def _open(self, inside: Group, hosts: list[list[int]], meet: Meet) -> Circle:
        carrying, talking = self._transport(), self._transport()
        told = meet(f"{carrying.address} {talking.address}")
        ranks = [rank for host in hosts for rank in host]
        for number, transport in enumerate((carrying, talking)):
            transport.connect({rank: told[rank].split()[number] for rank in ranks})
        group = HierarchicalGroup(inside, carrying, hosts, on_idle=self._on_idle)
        self._at_end.callback(group.close)
        return group, LetterParley(talking, ranks, self._on_idle)

    def _hear_all(self, text: str) -> Mapping[int, str]:
        """In a round of all, which this thread is in."""
        return dict(enumerate(self._parley.meet(text)))

    def _transport(self) -> ZmqTransport:
        world = self._world
        return ZmqTransport(
            world.global_rank,
            key=RunKey.from_text(world.secret),
            address=world.any_port,
            generation=world.generation,
            encrypt=world.encrypts,
            cable=cable_of(world),
        )

    def _open_inside(self) -> Group:
        world, own = self._world, self._own
        if len(own) == 1:
            return LoneGroup(world.global_rank)
        return MemoryGroup.of_all(Segment(world.arena_fd), world.local_rank, len(own), self._on_idle, ranks=own)

    def _inside_part(self, own: list[int]) -> Group:
        """Those of this host, with what to do while they wait of their own. All of this host call it."""
        rank = self._world.global_rank
        segment = self._inside.share(group_regions(len(own))) if len(own) > 1 else None
        if segment is None or rank not in own:
            return LoneGroup(rank)
        return MemoryGroup(segment, own.index(rank), own, Lookout(self._on_idle))
