"""What a machine computes with, as its own programs describe it; which GPUs are left out, and why. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_GPU_BYTES = 1 << 30
"""Less memory than this is used up by torch itself."""
_HALF_FLAGS = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "amx_fp16", "avx512_fp16")
_WIDE_FLAGS = ("avx512f", "avx2", "sve", "asimd")
SMI_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free", "compute_mode")
"""What `nvidia-smi` is asked for."""


@dataclass(frozen=True, kw_only=True)
class CpuSeen:
    """The processor of a machine."""

    model: str
    cores: int
    cache_bytes: int
    """Of the largest cache; 0 where nobody says."""
    vectors: tuple[str, ...]
    """Instructions for many numbers at a time."""
    halves: tuple[str, ...]
    """Instructions for half precision: without any it is many times slower than float32."""

    def __str__(self) -> str:
        cache = f", {self.cache_bytes >> 20} MiB cache" if self.cache_bytes else ""
        vectors = f"; {', '.join(self.vectors)}" if self.vectors else ""
        halves = ", ".join(self.halves) or "no instructions for bf16"
        return f"{self.model}, {self.cores} cores{cache}{vectors}; {halves}"


@dataclass(frozen=True, kw_only=True)
class GpuSeen:
    """A GPU as its driver describes it."""

    index: int
    name: str
    capability: tuple[int, int] = (0, 0)
    """Of its instructions; (0, 0) where nobody says."""
    total_bytes: int = 0
    free_bytes: int | None = None
    mode: str = "Default"
    error: str = ""
    """What went wrong when it was asked."""

    def why_left_out(self, built_for: Sequence[tuple[int, int]] = ()) -> str:
        """Why nothing is computed on it; empty where it can be. `built_for`: the capabilities that torch has code
        for, where that is known."""
        if self.error:
            return f"it answers with an error ({self.error})"
        if self.mode.lower() == "prohibited":
            return "its compute mode is Prohibited; nvidia-smi --compute-mode=DEFAULT would let processes use it"
        if built_for and self.capability != (0, 0) and self.capability < min(built_for):
            have, need = (".".join(map(str, each)) for each in (self.capability, min(built_for)))
            return f"its capability {have} is older than {need}, the oldest that this torch has code for"
        memory = self.total_bytes if self.free_bytes is None else self.free_bytes
        if memory < LEAST_GPU_BYTES:
            return f"it has {memory >> 20} MiB of memory free, and {LEAST_GPU_BYTES >> 20} are the least"
        return ""


def usable(gpus: Sequence[GpuSeen], built_for: Sequence[tuple[int, int]] = ()) -> tuple[list[GpuSeen], list[str]]:
    """Those to compute on, and a line about each that is left out."""
    reasons = {gpu.index: gpu.why_left_out(built_for) for gpu in gpus}
    lines = [f"GPU {gpu.index} ({gpu.name}): {reasons[gpu.index]}" for gpu in gpus if reasons[gpu.index]]
    return [gpu for gpu in gpus if not reasons[gpu.index]], lines


def read_smi(text: str) -> list[GpuSeen]:
    """What `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` printed, with `SMI_FIELDS`."""
    found = []
    for line in text.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(SMI_FIELDS) or not fields[0].isdecimal():
            continue
        index, name, capability, total, free, mode = fields
        broken = next((field for field in fields if "error" in field.lower() or "lost" in field.lower()), "")
        found.append(
            GpuSeen(
                index=int(index),
                name=name,
                capability=_pair(capability),
                total_bytes=_mebibytes(total),
                free_bytes=_mebibytes(free),
                mode=mode,
                error=broken.strip("[]"),
            )
        )
    return found


def read_architectures(names: Sequence[str]) -> list[tuple[int, int]]:
    """The capabilities of `torch.cuda.get_arch_list()`: `sm_90`, `sm_120`, `compute_90`."""
    numbers = [re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]*", name) for name in names]
    return sorted({(int(each[1]), int(each[2])) for each in numbers if each is not None})


def read_cpu(cpuinfo: str, caches: Mapping[str, str], cores: int) -> CpuSeen:
    """The processor that `/proc/cpuinfo` describes; `caches`: by file, what the kernel says of their sizes."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    sizes = [int(size[:-1]) << 10 for size in caches.values() if re.fullmatch(r"\d+K", size.strip())]
    return CpuSeen(
        model=fields.get("model name") or fields.get("CPU part") or "a processor",
        cores=cores,
        cache_bytes=max(sizes, default=0),
        vectors=tuple(flag for flag in _WIDE_FLAGS if flag in flags),
        halves=tuple(flag for flag in _HALF_FLAGS if flag in flags),
    )


def _pair(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0
