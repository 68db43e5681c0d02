"""Keep big buffers inside the process.

glibc hands every freed buffer above its thresholds back to the kernel and faults it in again at the next
step: a large share of a step for models whose gradients are megabytes each.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_LARGEST_INT = (2 << 30) - 1


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; False where there is no glibc to ask."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
