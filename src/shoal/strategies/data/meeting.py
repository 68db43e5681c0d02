"""How the workers of one host find each other: each leaves its address in the shared segment."""

from __future__ import annotations

import torch

from shoal.arena import Segment, counter_bytes
from shoal.strategies.base import Setting

_ADDRESS_BYTES = 256


def exchange_addresses(setting: Setting, address: str) -> dict[int, str]:
    """Leave this worker's address and return everybody's, by rank."""
    world = setting.world
    segment = Segment(world.arena_fd)
    segment.reserve("counters", counter_bytes(world.world_size))
    segment.reserve("addresses", _ADDRESS_BYTES * world.world_size)
    segment.map()
    counters = segment.counters("counters", setting.on_idle)
    rows = segment.tensor("addresses", torch.uint8).view(world.world_size, _ADDRESS_BYTES)
    text = address.encode().ljust(_ADDRESS_BYTES, b"\0")
    rows[world.global_rank] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    counters.publish(world.global_rank, 1)
    counters.wait_all(range(world.world_size), 1)
    roster = {rank: bytes(row.tolist()).rstrip(b"\0").decode() for rank, row in enumerate(rows)}
    segment.close()
    return roster
