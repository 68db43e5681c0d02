"""Whether memory stays flat."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MIB = 1 << 20


@contextmanager
def flat_memory(limit_mib: float = 8.0) -> Iterator[None]:
    """Fails when this process holds more memory afterwards than a few MiB over what it held before."""
    before = held_bytes()
    yield
    grown_mib = (held_bytes() - before) / MIB
    assert grown_mib < limit_mib, f"memory grew by {grown_mib:.1f} MiB"


def held_bytes() -> int:
    """What this process holds once it has given back all that it can."""
    gc.collect()
    # What a passing queue needed was freed, but the allocator likes to keep it.
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
