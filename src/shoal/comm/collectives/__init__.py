"""Operations in which all ranks take part: four ways to sum a tensor, and the broadcast."""

from __future__ import annotations

from shoal.comm.collectives.allgather import AllGather
from shoal.comm.collectives.base import Collective
from shoal.comm.collectives.ring import Ring
from shoal.comm.collectives.tree import Central, Tree
from shoal.comm.transport import Transport
from shoal.errors import unknown

COLLECTIVES: dict[str, type[Collective]] = {kind.name: kind for kind in (Ring, Tree, Central, AllGather)}

__all__ = ["COLLECTIVES", "AllGather", "Central", "Collective", "Ring", "Tree", "make_collective"]


def make_collective(
    name: str, transport: Transport, rank: int, size: int, *, timeout_s: float = 60.0
) -> Collective:
    """The collective of this name, for one rank of `size`."""
    if name not in COLLECTIVES:
        raise unknown("collective", name, COLLECTIVES)
    return COLLECTIVES[name](transport, rank, size, timeout_s=timeout_s)
