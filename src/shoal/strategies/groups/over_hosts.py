"""How workers on several hosts come together as one group: memory inside each host, our transport between them."""

from __future__ import annotations

import os
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from shoal.arena import Segment
from shoal.comm.group import Group, HierarchicalGroup, LoneGroup, MemoryGroup
from shoal.comm.tcp.pacing import cable_of
from shoal.comm.zmq_transport import ZmqTransport
from shoal.strategies.base import Setting
from shoal.strategies.groups.meeting import listening_address, meet

if TYPE_CHECKING:
    import torch


def ranks_by_host(hosts: tuple[int, ...]) -> list[range]:
    """The ranks on each host, where each has so many; a host without workers is not among them."""
    return [range(start, stop) for start, stop in pairwise(accumulate(hosts, initial=0)) if start < stop]


def open_transport(setting: Setting) -> ZmqTransport:
    """A transport to all workers on all hosts."""
    world, meeting = setting.world, meet(setting)
    transport = ZmqTransport(
        world.member,
        key=meeting.agree_on_key(),
        address=listening_address(setting),
        generation=world.generation,
        encrypt=world.encrypts,
        cable=cable_of(world),
    )
    try:
        transport.connect(meeting.exchange_addresses(transport.address))
    except BaseException:  # Those it was to meet may have been lost meanwhile.
        transport.abort()
        raise
    return transport


def open_over_hosts(setting: Setting, cast: torch.dtype | None = None) -> HierarchicalGroup:
    """All workers that there are; `cast`: how float32 travels between hosts."""
    world, on_idle = setting.world, setting.company.on_idle
    hosts = ranks_by_host(world.hosts)
    own = next(ranks for ranks in hosts if world.member in ranks)
    transport = open_transport(setting)
    inside: Group = LoneGroup(world.member)
    try:
        if world.generation:
            _begin_memory_anew(setting, own)
        if len(own) > 1:
            memory = Segment(world.arena_fd)
            inside = MemoryGroup.of_all(memory, own.index(world.member), len(own), on_idle, ranks=own)
    except BaseException:
        transport.abort()
        raise
    return HierarchicalGroup(inside, transport, hosts, on_idle=on_idle, cast=cast)


def _begin_memory_anew(setting: Setting, own: range) -> None:
    """Have the host's memory as it was before anybody used it: those who are lost were in the middle of something
    there, and others may be fewer than they were. All have met by now, so nobody uses it any more."""
    world, company = setting.world, setting.company
    assert company.meet is not None, "somebody supervises workers on several hosts"
    if world.member == own[0] and world.arena_fd is not None:
        os.ftruncate(world.arena_fd, 0)
    company.meet(f"memory@{world.generation}", "")
