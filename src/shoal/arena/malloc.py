"""Tell glibc what memory to keep.

By itself it hands every freed buffer above its thresholds back to the kernel and faults it in again at the next
step: a large share of a step for models whose gradients are megabytes each.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
_LARGEST_INT = (2 << 30) - 1
_SMALL_BYTES = 1 << 20
_STACK_BYTES = 2 << 20
_ATTRIBUTE_BYTES = 64
"""At least those of a `pthread_attr_t`."""


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process; False where there is no glibc to ask."""
    return _set({_M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _LARGEST_INT})


def return_freed_memory() -> bool:
    """Hand big buffers back at once, and let all threads share one heap, each of which would keep some; False
    where there is no glibc to ask."""
    return _set({_M_MMAP_THRESHOLD: _SMALL_BYTES, _M_TRIM_THRESHOLD: _SMALL_BYTES, _M_ARENA_MAX: 1})


def _set(options: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in options.items())


def use_small_stacks() -> bool:
    """Let new threads reserve little address space, of which stacks use next to nothing; False where there is no
    glibc to ask."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_setattr_default_np"):
        return False
    attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    return (
        library.pthread_attr_init(attribute) == 0
        and library.pthread_attr_setstacksize(attribute, ctypes.c_size_t(_STACK_BYTES)) == 0
        and library.pthread_setattr_default_np(attribute) == 0
    )
