"""One piece of a device's memory that several processes map: what `Segment` is for the memory of a host.

One of them makes it, and leaves a descriptor on the host's shelf, where all others find it. It lives as long as
the shelf does: longer than any of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shoal.arena.shelf import FdShelf
from shoal.errors import LaunchError
from shoal.spec.footprint import paged

if TYPE_CHECKING:
    import torch


class DeviceDriver(Protocol):
    """How memory of one device is made and mapped."""

    name: str
    """The device, as no other is called."""

    def make(self, nbytes: int) -> int:
        """A descriptor of new memory; `OSError` where there is too little."""

    def map(self, fd: int, nbytes: int) -> int:
        """Map the memory that a descriptor stands for; where it begins."""

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """Bytes that are mapped, as a tensor with a storage of its own."""


class DeviceSegment:
    """Regions are reserved by name, in the same order by everybody; then the memory is mapped once."""

    def __init__(self, driver: DeviceDriver, shelf: FdShelf) -> None:
        """`shelf`: this process's own descriptors of it, which are closed when the memory is mapped."""
        self._driver = driver
        self._shelf = shelf
        self._regions: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._address: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of the whole segment."""
        return self._size

    @property
    def is_mapped(self) -> bool:
        """Whether this process has it."""
        return self._address is not None

    def reserve(self, name: str, nbytes: int) -> None:
        """Put a region behind those reserved so far."""
        assert self._address is None and name not in self._regions
        self._regions[name] = (self._size, nbytes)
        self._size += paged(nbytes)

    def map(self, *, makes: bool, on_idle: Callable[[], None] | None = None) -> None:
        """Map what lies on the shelf. `makes`: where nothing does, make it, all zeros; others wait for that."""
        found = self._shelf.look()
        if found is None and makes:
            self._make()
        label, fd = found or self._shelf.wait(on_idle)
        try:
            self._check(json.loads(label))
            self._address = self._driver.map(fd, self._size)
        finally:
            os.close(fd)
            self._shelf.close()

    def _make(self) -> None:
        try:
            fd = self._driver.make(self._size)
        except OSError as error:
            raise LaunchError(
                f"Shoal could not share {self._size / 2**20:.0f} MiB of {self._driver.name} between processes "
                f"({error.strerror}); use fewer slots, journal=off, or a GPU with more memory."
            ) from None
        self._shelf.put(json.dumps([self._driver.name, self._size]), fd)
        os.close(fd)

    def _check(self, made: list[object]) -> None:
        if made[0] != self._driver.name:
            raise LaunchError(
                f"data: via=arena shares the memory of one GPU, but workers compute on {made[0]} and "
                f"{self._driver.name}; use via=backend, or let CUDA_VISIBLE_DEVICES name one GPU."
            )
        if made[1] != self._size:
            raise LaunchError(
                f"The shared memory of the GPU has {made[1]} bytes, but this process needs {self._size}: the task "
                "builds another model here than in the other workers; make it depend on nothing but its arguments "
                "and the seed."
            )

    def tensor(self, name: str, dtype: torch.dtype, *, offset: int = 0, count: int | None = None) -> torch.Tensor:
        """A flat tensor over (part of) a region; `offset` in bytes, `count` in elements."""
        start, nbytes = self._regions[name]
        count = (nbytes - offset) // dtype.itemsize if count is None else count
        assert self._address is not None and offset + count * dtype.itemsize <= nbytes
        return self._driver.view(self._address + start + offset, count * dtype.itemsize).view(dtype)
