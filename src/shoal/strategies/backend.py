"""torch's own collectives: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from shoal.strategies.base import Setting
from shoal.strategies.data.meeting import Meeting
from shoal.strategies.listening import only_meanwhile

PATIENCE = timedelta(minutes=5)
"""For a peer that is busy; one that died is noticed by the supervisor at once."""


class Backend:
    """torch's process group of all workers, and sums over it."""

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
        # NCCL refuses two processes on one GPU, and tensors of the host; gloo takes both.
        own_gpu = world.device != "cpu" and torch.cuda.device_count() >= world.local_size
        self.name = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            with only_meanwhile():
                dist.init_process_group(
                    self.name,
                    # Its own descriptor, never closed: the store opens this path once more when it is freed, and
                    # would wait for minutes if the first process were gone by then.
                    store=dist.FileStore(f"/proc/self/fd/{store_fd}", world.world_size),
                    rank=world.global_rank,
                    world_size=world.world_size,
                    timeout=PATIENCE,
                )

    def allreduce_(self, tensor: torch.Tensor) -> None:
        """Sum over all workers, in place."""
        self._dist.all_reduce(tensor)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Take the first worker's values."""
        self._dist.broadcast(tensor, 0)

    def close(self) -> None:
        """Leave the others."""
        if self._owns_group:
            self._dist.destroy_process_group()
