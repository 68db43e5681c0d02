"""How processes that somebody else started come to share a segment.

The first makes it; the others open it by the first's process id and descriptor, which they learn from the segment
that `shoal run` gave all of them, or else from a store such as torchrun's. A process may make one Trainer after
another: every meeting has its number.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from shoal.arena import Segment, counter_bytes
from shoal.errors import LaunchError, SpecError
from shoal.spec import World

_HANDLE_BYTES = 64


def share_segment(world: World) -> tuple[World, Any]:
    """The world with a segment of its own, and what must live as long as others may ask for it."""
    if world.world_size == 1:
        return replace(world, arena_fd=None), None
    if world.local_size != world.world_size:
        raise LaunchError(
            f"This process is one of {world.local_size} on its host, but the world has {world.world_size}; a "
            "Trainer shares one host's memory, so start all of them on one host."
        )
    if world.arena_fd is not None:
        return replace(world, arena_fd=_meet_in_segment(world, world.arena_fd)), None
    store = _connect_store(world)
    return replace(world, arena_fd=_meet_at_store(world, store)), store


def _meet_in_segment(world: World, given_fd: int) -> int:
    place = Segment(given_fd)
    place.reserve("counters", counter_bytes(1 + world.world_size))
    place.reserve("handle", _HANDLE_BYTES)
    place.map()
    counters = place.counters("counters")
    handle = place.tensor("handle", torch.uint8).numpy()
    opened, joined = 0, range(1, 1 + world.world_size)
    number = counters[joined[world.global_rank]] + 1
    segment = Segment()
    if world.global_rank == 0:
        handle[:] = list(segment.handle.encode().ljust(_HANDLE_BYTES, b"\0"))
        counters.publish(opened, number)
        # The descriptor must outlive the others' look-up.
        counters.wait_all(joined[1:], number)
    else:
        counters.wait(opened, number)
        segment.share_with(handle.tobytes().rstrip(b"\0").decode())
    counters.publish(joined[world.global_rank], number)
    return segment.detach()


def _meet_at_store(world: World, store: Any) -> int:
    number = store.add(f"trainers/{world.global_rank}", 1)
    segment = Segment()
    if world.global_rank == 0:
        store.set(f"{number}/segment", segment.handle)
        for rank in range(1, world.world_size):
            store.get(f"{number}/joined/{rank}")
    else:
        segment.share_with(store.get(f"{number}/segment").decode())
        store.set(f"{number}/joined/{world.global_rank}", "")
    return segment.detach()


def _connect_store(world: World) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address is None or not port.isdigit():
        raise SpecError(
            f"World: WORLD_SIZE={world.world_size}, but MASTER_ADDR and MASTER_PORT do not say where processes "
            "meet; start this script with torchrun or `shoal run`."
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = world.global_rank == 0 and not hosted
    # Several stores of a process share one server: torch.distributed may have its own at the same address.
    return PrefixStore("shoal", TCPStore(address, int(port), is_master=is_master, multi_tenant=True))
