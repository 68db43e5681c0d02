"""What a process computes on."""

from __future__ import annotations

import torch

from shoal.errors import SpecError


def choose_device(kind: str, local_rank: int) -> str:
    """This worker's device. Asked here and never in the zygote, whose children could then not use GPUs."""
    if kind == "cpu":
        return kind
    if not torch.cuda.is_available():
        raise SpecError(f"Cluster: device={kind} was asked for, but torch finds no GPU here; use device=cpu.")
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device
