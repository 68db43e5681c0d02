"""Waiting for other processes: step counters in shared memory, with futex.

Every counter has one writer and only ever rises, so a death leaves nothing to repair: whoever takes the dead
process's place reads the counters and goes on from there. Readers trust x86-64's store order: what was written
before a counter is visible to whoever sees the counter.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable

LINE = 64
"""Bytes from one counter to the next: a cache line each, so that writers do not disturb one another."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_WAKE_ALL = 1 << 30
_POLL_NS = 50_000_000
_SYS_FUTEX = {"x86_64": 202}
"""Machines that keep the order of stores; others would need barriers, which Python has not."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Counters:
    """A row of 32-bit counters at `address`, one per cache line."""

    def __init__(self, words: memoryview, address: int, on_idle: Callable[[], None] | None = None) -> None:
        self._words = words.cast("B").cast("i")
        self._address = address
        self._on_idle = on_idle
        self._number = ctypes.c_long(_SYS_FUTEX[platform.machine()])
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._timeout = ctypes.byref(_Timespec(0, _POLL_NS))

    def __getitem__(self, index: int) -> int:
        return self._words[index * (LINE // 4)]

    def __setitem__(self, index: int, value: int) -> None:
        """Write without waking anyone: for progress that only a successor reads."""
        self._words[index * (LINE // 4)] = value

    def publish(self, index: int, value: int) -> None:
        """Raise a counter and wake all who wait for it."""
        self._words[index * (LINE // 4)] = value
        self._syscall(
            self._number,
            ctypes.c_void_p(self._address + index * LINE),
            _FUTEX_WAKE,
            ctypes.c_int(_WAKE_ALL),
            None,
            None,
            0,
        )

    def wait(self, index: int, value: int) -> None:
        """Return once the counter has reached `value`.

        Every 50 ms without news `on_idle` is called; it raises to give up (the run was stopped).
        """
        word = index * (LINE // 4)
        if self._words[word] >= value:
            return
        address = ctypes.c_void_p(self._address + index * LINE)
        while (seen := self._words[word]) < value:
            self._syscall(self._number, address, _FUTEX_WAIT, ctypes.c_int(seen), self._timeout, None, 0)
            if self._on_idle is not None and self._words[word] == seen:
                self._on_idle()

    def wait_all(self, indices: range, value: int) -> None:
        """Return once all these counters have reached `value`."""
        for index in indices:
            self.wait(index, value)


def supported() -> bool:
    """Whether this machine has what the arena needs."""
    return platform.system() == "Linux" and platform.machine() in _SYS_FUTEX and hasattr(os, "memfd_create")
