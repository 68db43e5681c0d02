"""Memory of the host in the place of a GPU's, for what does not depend on which it is."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch


class HostDriver:
    """As `CudaDriver`: memory without a name, handed on as a descriptor."""

    def __init__(self, device: str = "cpu", name: str = "GPU 0") -> None:
        self.name = name
        self._mapped: dict[int, mmap.mmap] = {}

    def make(self, nbytes: int) -> int:
        fd = os.memfd_create("device")
        os.ftruncate(fd, nbytes)
        return fd

    def map(self, fd: int, nbytes: int) -> int:
        memory = mmap.mmap(fd, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mapped[address] = memory
        return address

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        start = max(one for one in self._mapped if one <= address)
        return torch.frombuffer(self._mapped[start], dtype=torch.uint8, count=nbytes, offset=address - start)
