"""One piece of memory that all processes of a host map.

It is a memfd handed on as a file descriptor: it has no name that could leak, no /dev/shm limit, and lives
exactly as long as somebody maps it. Every process computes the same table of regions from the same job, so
nobody has to tell anybody where things are.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.arena.room import ROOM_BYTES, GrowingRoom
from shoal.arena.waits import LINE, Counters
from shoal.errors import LaunchError
from shoal.spec.footprint import paged

if TYPE_CHECKING:
    import torch


class SharedMemory(Protocol):
    """Regions that several processes map."""

    def tensor(self, name: str, dtype: torch.dtype, *, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """A flat tensor over (part of) a region; `offset` in bytes, `count` in elements."""


class Segment:
    """Regions are reserved by name, in the same order by everybody; then the memory is mapped once."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.memfd_create("shoal-arena") if fd is None else fd
        self._owns_fd = fd is None
        self._regions: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._num_rooms = 0
        self._memory: mmap.mmap | None = None
        self._address = 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Put a region behind those reserved so far."""
        assert self._memory is None and name not in self._regions
        self._regions[name] = (self._size, nbytes)
        self._size += paged(nbytes)

    def add_rooms(self, count: int) -> None:
        """Have rooms behind all regions, which take no memory until they are used."""
        assert self._memory is None
        self._num_rooms = count

    def map(self) -> None:
        """Give the segment its size (the same in every process) and map it."""
        rooms = self._num_rooms * ROOM_BYTES
        try:
            if (found := os.fstat(self._fd).st_size) not in (0, self._size + rooms):
                raise LaunchError(
                    f"The shared segment has {found - rooms} bytes, but this process needs "
                    f"{self._size}: the task builds another model here than in the other workers; make it "
                    "depend on nothing but its arguments and the seed."
                )
            os.ftruncate(self._fd, self._size + rooms)
            self._memory = mmap.mmap(self._fd, self._size)
        except OSError as error:
            raise LaunchError(
                f"Shoal could not share {self._size / 2**20:.0f} MiB between processes ({error.strerror}); "
                "use fewer slots or a machine with more memory."
            ) from None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def tensor(self, name: str, dtype: torch.dtype, *, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """A flat tensor over (part of) a region; `offset` in bytes, `count` in elements."""
        import torch

        start, nbytes = self._regions[name]
        count = (nbytes - offset) // dtype.itemsize if count is None else count
        assert self._memory is not None and offset + count * dtype.itemsize <= nbytes
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start + offset)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the segment a tensor's memory begins; None where it is elsewhere, or not in one piece."""
        offset = tensor.data_ptr() - self._address
        return offset if tensor.is_contiguous() and 0 <= offset < self._size else None

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor that lies there."""
        import torch

        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=offset).view(*shape)

    def counters(self, name: str, on_idle: Callable[[], None] | None = None) -> Counters:
        """The counters of a region made with `counter_bytes`."""
        assert self._memory is not None
        start, nbytes = self._regions[name]
        return Counters(memoryview(self._memory)[start : start + nbytes], self._address + start, on_idle)

    def bytes_of(self, name: str) -> memoryview:
        """A region as plain bytes."""
        assert self._memory is not None
        start, nbytes = self._regions[name]
        return memoryview(self._memory)[start : start + nbytes]

    def room(self, number: int) -> GrowingRoom:
        """One of the rooms behind the regions."""
        assert number < self._num_rooms
        return GrowingRoom(self._fd, self._size + number * ROOM_BYTES)

    @property
    def nbytes(self) -> int:
        """Size of the whole segment, without rooms."""
        return self._size

    def share_with(self, handle: str) -> None:
        """Use the segment of another process of this user instead of an own one."""
        own, self._fd = self._fd, _open(handle)
        if self._owns_fd:
            os.close(own)
        self._owns_fd = True

    @classmethod
    def of(cls, handle: str) -> Segment:
        """The segment of another process of this user."""
        found = cls(_open(handle))
        found._owns_fd = True
        return found

    @property
    def handle(self) -> str:
        """What another process of this user needs to open this segment."""
        return f"{os.getpid()}:{self._fd}"

    def detach(self) -> int:
        """Hand the descriptor over to the caller."""
        self._owns_fd = False
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last view."""
        if self._owns_fd:
            os.close(self._fd)
            self._owns_fd = False


def segment_bytes(regions: Iterable[int]) -> int:
    """The size of a segment with regions of so many bytes each."""
    return sum(map(paged, regions))


def _open(handle: str) -> int:
    pid, fd = handle.split(":")
    return os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDWR)


def counter_bytes(count: int) -> int:
    """Room for so many counters."""
    return count * LINE
