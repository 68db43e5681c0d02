"""A GPU that has too little memory: said in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves

from shoal.errors import OutOfMemory
from shoal.layout.gpu_need import GpuHeld, GpuRemedies, told_of
from shoal.model.replica import Replica
from shoal.spec import Job


@contextmanager
def gpu_memory_explained(job: Job, replica: Replica) -> Iterator[None]:
    """Where a GPU's memory runs out in what is done here, say what held it and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = held_by(replica)
        remedies = GpuRemedies(
            precision=job.precision == "fp32",
            recompute=not job.recompute,
            offload=job.offload == "none" and not job.graph and job.conduct.open_commits > 1,
            several=job.cluster.places == 1,
        )
        raise OutOfMemory(told_of(held, asked=_asked(str(error)), remedies=remedies)) from error


def held_by(replica: Replica) -> GpuHeld:
    """What a replica and all others have of its GPU."""
    device = torch.device(replica.device)
    free, total = torch.cuda.mem_get_info(device)
    params = [*replica.trained.values(), *replica.untrained.values()]
    state = tree_leaves([dict(kept) for kept in replica.optimizer.state.values()])
    return GpuHeld(
        name=f"{torch.cuda.get_device_name(device)} ({replica.device})",
        total=total,
        free=free,
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        parameters=_bytes(params),
        gradients=_bytes([param.grad for param in params if param.grad is not None]),
        state=_bytes([leaf for leaf in state if isinstance(leaf, torch.Tensor)]),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)


def _asked(text: str) -> str:
    found = re.search(r"Tried to allocate ([\d.]+ [A-Za-z]+)", text)
    return f"{found[1]} more were asked for" if found else "more was asked for"
