"""Memory of a segment that grows as it is used: for what nobody knows the size of beforehand."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.arena.waits import Counters
from shoal.errors import LaunchError

if TYPE_CHECKING:
    import torch

ROOM_BYTES = 1 << 36
"""From one room to the next: address space of a sparse file, of which only what is written takes memory."""
_HEAD_BYTES = mmap.PAGESIZE
_FIRST_WINDOW = 1 << 20
_COUNTER_BYTES = 64


class GrowingRoom:
    """A page with a counter and a few words, and bytes behind it that are mapped as they are asked for."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset
        self._head = mmap.mmap(fd, _HEAD_BYTES, offset=offset)
        self._window: mmap.mmap | None = None
        self.words = memoryview(self._head)[_COUNTER_BYTES:].cast("q")
        """Whole numbers for whoever uses the room."""

    def counter(self, on_idle: Callable[[], None] | None) -> Counters:
        """The room's counter: number 0 of these."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._head))
        return Counters(memoryview(self._head)[:_COUNTER_BYTES], address, on_idle)

    def bytes(self, start: int, count: int) -> torch.Tensor:
        """A part of the room, as bytes."""
        import torch

        if not count:
            return torch.empty(0, dtype=torch.uint8)
        if self._window is None or start + count > len(self._window):
            self._window = self._map(start + count)
        return torch.frombuffer(self._window, dtype=torch.uint8, count=count, offset=start)

    def _map(self, needed: int) -> mmap.mmap:
        size = _FIRST_WINDOW
        while size < needed:
            size *= 2
        if size > ROOM_BYTES - _HEAD_BYTES:
            raise LaunchError(
                f"Slots bring each other at most {ROOM_BYTES >> 31} GiB in a step, but one brought "
                f"{needed / 2**30:.0f} GiB; gather fewer or smaller rows."
            )
        return mmap.mmap(self._fd, size, offset=self._offset + _HEAD_BYTES)
