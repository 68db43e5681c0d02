"""The ways to sum a tensor over workers that do not share memory: our own algorithms, or torch's."""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.strategies.base import Setting
from shoal.strategies.groups.backend import PATIENCE, open_backend
from shoal.strategies.groups.meeting import listening_address, meet


class Summing(Protocol):
    """Sums flat tensors over all workers, in place, with the same bits everywhere; as a `Group` does."""

    def all_reduce_(self, tensor: torch.Tensor) -> object: ...

    def broadcast_(self, tensor: torch.Tensor) -> object: ...

    def close(self) -> None: ...


def make_summing(via: str, setting: Setting) -> Summing:
    """Connect to the other workers."""
    return open_backend(setting) if via == "backend" else SocketSumming(via, setting)


class SocketSumming:
    """Our own algorithms over ZeroMQ on loopback."""

    def __init__(self, via: str, setting: Setting) -> None:
        from shoal.comm.collectives import make_collective
        from shoal.comm.tcp.pacing import cable_of
        from shoal.comm.zmq_transport import ZmqTransport

        world = setting.world
        meeting = meet(setting)
        self._transport = ZmqTransport(
            world.global_rank,
            key=meeting.agree_on_key(),
            address=listening_address(setting),
            generation=world.generation,
            encrypt=world.encrypts,
            cable=cable_of(world),
        )
        self._transport.connect(meeting.exchange_addresses(self._transport.address))
        collective = make_collective(
            via, self._transport, world.global_rank, world.world_size, timeout_s=PATIENCE.total_seconds()
        )
        self.all_reduce_ = collective.allreduce_
        self.broadcast_ = collective.broadcast_

    def close(self) -> None:
        self._transport.close()
