"""The ways to sum a tensor over workers that do not share memory: our own algorithms, or torch's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from shoal.strategies.base import Setting
from shoal.strategies.data.meeting import Meeting

_PATIENCE = timedelta(minutes=5)
"""For a peer that is busy; one that died is noticed by the supervisor at once."""


class Summing(Protocol):
    """Sums flat tensors over all workers, in place, with the same bits everywhere."""

    def allreduce_(self, tensor: torch.Tensor) -> None: ...

    def broadcast_(self, tensor: torch.Tensor) -> None: ...

    def close(self) -> None: ...


def make_summing(via: str, setting: Setting) -> Summing:
    """Connect to the other workers."""
    return BackendSumming(setting) if via == "backend" else SocketSumming(via, setting)


class SocketSumming:
    """Our own algorithms over ZeroMQ on loopback."""

    def __init__(self, via: str, setting: Setting) -> None:
        from shoal.comm.collectives import make_collective
        from shoal.comm.zmq_transport import ZmqTransport

        world = setting.world
        # On one host a Unix socket moves bytes faster than tcp; a fixed port asks for tcp.
        where: dict[str, Any] = (
            {"via": "ipc"} if setting.port is None else {"port": setting.port + world.global_rank}
        )
        meeting = Meeting(setting)
        self._transport = ZmqTransport(
            world.global_rank, key=meeting.agree_on_key(), generation=world.generation, **where
        )
        self._transport.connect(meeting.exchange_addresses(self._transport.address))
        collective = make_collective(
            via, self._transport, world.global_rank, world.world_size, timeout_s=_PATIENCE.total_seconds()
        )
        self.allreduce_ = collective.allreduce_
        self.broadcast_ = collective.broadcast_

    def close(self) -> None:
        self._transport.close()


class BackendSumming:
    """torch's own collectives: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, setting: Setting) -> None:
        import torch.distributed as dist

        world = setting.world
        # A file nobody else can see takes the place of torch's TCP store, which listens on all interfaces.
        store_fd = os.memfd_create("shoal-store") if world.global_rank == 0 else -1
        roster = Meeting(setting).exchange_addresses(f"/proc/{os.getpid()}/fd/{store_fd}")
        if world.global_rank:
            store_fd = os.open(roster[0], os.O_RDWR)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._dist = dist
        # NCCL refuses two processes on one GPU; gloo takes GPU tensors too.
        own_gpu = world.device != "cpu" and torch.cuda.device_count() >= world.local_size
        self._backend = "nccl" if own_gpu else "gloo"
        self._device = world.device
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group(
                self._backend,
                # Its own descriptor, never closed: the store opens this path once more when it is freed, and
                # would wait for minutes if the first process were gone by then.
                store=dist.FileStore(f"/proc/self/fd/{store_fd}", world.world_size),
                rank=world.global_rank,
                world_size=world.world_size,
                timeout=_PATIENCE,
            )

    def allreduce_(self, tensor: torch.Tensor) -> None:
        self._on_device(tensor, self._dist.all_reduce)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        self._on_device(tensor, lambda moved: self._dist.broadcast(moved, 0))

    def _on_device(self, tensor: torch.Tensor, collective: Callable[[torch.Tensor], Any]) -> None:
        """NCCL moves GPU memory alone: small tables of the host go there and back."""
        if self._backend == "nccl" and tensor.device.type == "cpu":
            moved = tensor.to(self._device)
            collective(moved)
            tensor.copy_(moved)
        else:
            collective(tensor)

    def close(self) -> None:
        if self._owns_group:
            self._dist.destroy_process_group()
