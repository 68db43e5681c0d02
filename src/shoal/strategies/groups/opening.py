"""How the workers of a run come together as one group, in the form that suits them."""

from __future__ import annotations

from shoal.arena import Segment, supported
from shoal.comm.group import Group, LoneGroup
from shoal.errors import LaunchError
from shoal.strategies.base import Setting


def open_group(via: str, setting: Setting) -> Group:
    """All workers: through shared memory (`memory`), torch's collectives (`backend`), our sockets (`sockets`), or,
    with `auto`, memory where this machine can and the tensors are in the host's, else torch's. Over several hosts
    `auto` is memory inside each, and sockets between them."""
    world = setting.world
    if world.world_size == 1:
        return LoneGroup(world.global_rank)
    if via == "auto" and world.is_spread and world.device == "cpu" and supported():
        from shoal.strategies.groups.over_hosts import open_over_hosts

        return open_over_hosts(setting)
    if via == "auto":
        via = "memory" if world.device == "cpu" and supported() else "backend"
    match via:
        case "memory":
            return open_memory(setting)
        case "sockets":
            return open_sockets(setting)
    from shoal.strategies.groups.backend import open_backend

    return open_backend(setting)


def open_memory(setting: Setting) -> Group:
    """A group in the host's shared segment."""
    from shoal.comm.group import MemoryGroup

    if not supported():
        raise LaunchError("via=memory needs Linux on x86-64, with memfd and futex; leave it out here.")
    world = setting.world
    return MemoryGroup.of_all(
        Segment(world.arena_fd), world.global_rank, world.world_size, setting.company.on_idle
    )


def open_sockets(setting: Setting) -> Group:
    """A group over our own transport, whose key and addresses are left in the shared segment."""
    from shoal.comm.group import SocketGroup
    from shoal.comm.tcp.pacing import cable_of
    from shoal.comm.zmq_transport import ZmqTransport
    from shoal.strategies.groups.meeting import listening_address, meet

    world = setting.world
    meeting = meet(setting)
    transport = ZmqTransport(
        world.global_rank,
        key=meeting.agree_on_key(),
        address=listening_address(setting),
        generation=world.generation,
        encrypt=world.encrypts,
        cable=cable_of(world),
    )
    transport.connect(meeting.exchange_addresses(transport.address))
    return SocketGroup(transport, range(world.world_size), on_idle=setting.company.on_idle)
