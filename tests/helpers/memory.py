"""Whether memory stays flat, and whether a leak would have been seen."""

from __future__ import annotations

import ctypes
import gc

import psutil

MIB = 1 << 20
# A leak of all that was sent must stand out from what an allocator keeps.
_LEAK_TO_LIMIT = 2


def require_flat_under(sent_bytes: int, grown_bytes: int, limit_mib: float) -> None:
    """Fails when a receiver has grown, or was sent too little to tell whether it keeps what it gets."""
    sent_mib = sent_bytes / MIB
    assert sent_mib >= _LEAK_TO_LIMIT * limit_mib, f"a leak of {sent_mib:.1f} MiB can hide below {limit_mib} MiB"
    require_flat(grown_bytes, limit_mib)


def require_flat(grown_bytes: int, limit_mib: float) -> None:
    """Fails when memory has grown by more than an allocator may keep."""
    grown_mib = grown_bytes / MIB
    assert grown_mib < limit_mib, f"memory grew by {grown_mib:.1f} MiB"


def held_bytes() -> int:
    """What this process holds once it has given back all that it can."""
    gc.collect()
    # What a passing queue needed was freed, but the allocator likes to keep it.
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
