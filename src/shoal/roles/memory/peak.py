"""The most memory that a process has held."""

from __future__ import annotations

import torch


def peak_memory(device: str) -> dict[str, int]:
    """Bytes: of the host's memory in `host`, pages that others share included, and of a GPU's in `gpu`; in
    `gpu_taken` what was taken from the driver for that."""
    found = {"host": peak_resident_bytes()}
    if device != "cpu":
        found["gpu"] = torch.cuda.max_memory_allocated(device)
        found["gpu_taken"] = torch.cuda.max_memory_reserved(device)
    return found


def peak_resident_bytes() -> int:
    """The most of this process's memory that was in RAM at a time."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
