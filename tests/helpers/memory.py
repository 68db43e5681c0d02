"""Whether memory stays flat, and whether a leak would have been seen."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass

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


class _MallocFacts(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of a process at one moment."""

    resident_bytes: int
    used_bytes: int
    """What was asked of malloc and not freed. A forked process finds room in what it inherited, so that what it
    keeps need not show in `resident_bytes`."""

    def grown_since(self, before: Held) -> int:
        """By whichever tells of more."""
        return max(self.resident_bytes - before.resident_bytes, self.used_bytes - before.used_bytes)


def held() -> Held:
    """What this process holds once it has given back all that it can."""
    gc.collect()
    libc = ctypes.CDLL(None)
    # What a passing queue needed was freed, but the allocator likes to keep it.
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallocFacts
    facts = libc.mallinfo2()
    return Held(resident_bytes=psutil.Process().memory_info().rss, used_bytes=facts.uordblks + facts.hblkhd)
