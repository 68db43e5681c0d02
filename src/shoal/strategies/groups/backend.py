"""torch's own collectives: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from shoal.comm.listening import only_meanwhile
from shoal.strategies.base import Setting
from shoal.strategies.groups.meeting import SegmentMeeting

if TYPE_CHECKING:
    from shoal.comm.group import TorchGroup

PATIENCE = timedelta(minutes=5)
"""For a peer that is busy; one that died is noticed by the supervisor at once."""


def open_backend(setting: Setting) -> TorchGroup:
    """torch's process group of all workers."""
    import torch.distributed as dist

    from shoal.comm.group import TorchGroup

    world = setting.world
    # A file nobody else can see takes the place of torch's TCP store, which listens on all interfaces.
    store_fd = os.memfd_create("shoal-store") if world.global_rank == 0 else -1
    roster = SegmentMeeting(setting).exchange_addresses(f"/proc/{os.getpid()}/fd/{store_fd}")
    if world.global_rank:
        store_fd = os.open(roster[0], os.O_RDWR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # NCCL refuses two processes on one GPU, and tensors of the host; gloo takes both.
    own_gpu = world.device != "cpu" and torch.cuda.device_count() >= world.local_size
    is_ours = not dist.is_initialized()
    if is_ours:
        with only_meanwhile():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                # Its own descriptor, never closed: the store opens this path once more when it is freed, and
                # would wait for minutes if the first process were gone by then.
                store=dist.FileStore(f"/proc/self/fd/{store_fd}", world.world_size),
                rank=world.global_rank,
                world_size=world.world_size,
                timeout=PATIENCE,
            )
    return TorchGroup(
        world.global_rank,
        range(world.world_size),
        on_block=setting.company.on_block,
        on_close=dist.destroy_process_group if is_ours else None,
    )
