"""What a process computes on."""

from __future__ import annotations

import torch

from shoal.errors import SpecError
from shoal.layout.devices import GpuSeen, read_architectures, usable
from shoal.spec.cluster import MIXED


def choose_device(kind: str, local_rank: int) -> str:
    """This worker's device. Asked here and never in the zygote, whose children could then not use GPUs."""
    if kind == "cpu":
        return kind
    if not torch.cuda.is_available():
        raise SpecError(f"Cluster: device={kind} was asked for, but torch finds no GPU here; use device=cpu.")
    found, lines = usable(seen_by_torch(), read_architectures(torch.cuda.get_arch_list()))
    if kind == MIXED and 0 < len(found) <= local_rank:
        return "cpu"
    # Who shares a GPU with others takes the next one where its own does not answer.
    for turn in range(len(found)):
        gpu = found[(local_rank + turn) % len(found)]
        try:
            torch.cuda.set_device(gpu.index)
            torch.empty(1, device=f"cuda:{gpu.index}")
        except RuntimeError as error:
            lines.append(f"GPU {gpu.index} ({gpu.name}): {str(error).splitlines()[0]}")
            continue
        return f"cuda:{gpu.index}"
    raise SpecError(
        f"Cluster: device={kind} was asked for, but no GPU can be used: {'; '.join(lines)}; use device=cpu."
    )


def seen_by_torch() -> list[GpuSeen]:
    """All GPUs that torch knows of. Nothing is computed on them, for that takes memory from each."""
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            about = torch.cuda.get_device_properties(index)
        except RuntimeError as error:
            found.append(GpuSeen(index=index, name="unknown", error=str(error).splitlines()[0]))
            continue
        found.append(
            GpuSeen(
                index=index,
                name=about.name,
                capability=(about.major, about.minor),
                total_bytes=about.total_memory,
            )
        )
    return found
