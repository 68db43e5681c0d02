"""Memory of a GPU that processes share, by the driver's own functions for virtual memory.

Memory that is made so can be exported as a file descriptor, and is freed when nobody maps it or holds one. What
torch allocates could be shared, too, but would go with the process that made it.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import LaunchError

_PINNED, _ON_DEVICE, _AS_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """Memory of one of torch's GPUs."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._index = self._device.index or 0
        torch.zeros(1, device=device)  # the driver's functions take torch's context
        self._calls = ctypes.CDLL("libcuda.so.1")
        about = torch.cuda.get_device_properties(self._device)
        self.name = f"GPU {about.uuid} ({about.name})"

    def make(self, nbytes: int) -> int:
        """A descriptor of new memory, all zeros."""
        handle, fd = ctypes.c_uint64(), ctypes.c_int()
        size = self._whole(nbytes)
        self._call(
            "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation), ctypes.c_ulonglong(0)
        )
        try:
            self._call(
                "cuMemExportToShareableHandle",
                ctypes.byref(fd),
                handle,
                ctypes.c_int(_AS_DESCRIPTOR),
                ctypes.c_ulonglong(0),
            )
            address = self._map(handle, size)
        finally:
            self._call("cuMemRelease", handle)  # what is mapped or exported stays
        self._bytes(address, size.value).zero_()
        torch.cuda.synchronize(self._device)
        self._call("cuMemUnmap", ctypes.c_uint64(address), size)
        self._call("cuMemAddressFree", ctypes.c_uint64(address), size)
        return fd.value

    def map(self, fd: int, nbytes: int) -> int:
        """Map the memory that a descriptor stands for; where it begins."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(fd),
            ctypes.c_int(_AS_DESCRIPTOR),
        )
        try:
            return self._map(handle, self._whole(nbytes))
        finally:
            self._call("cuMemRelease", handle)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """Bytes that are mapped, as a tensor with a storage of its own."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return self._bytes(address, nbytes)

    def _map(self, handle: ctypes.c_uint64, size: ctypes.c_size_t) -> int:
        address = ctypes.c_uint64()
        nothing, nowhere = ctypes.c_size_t(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, nothing, nowhere, ctypes.c_ulonglong(0))
        self._call("cuMemMap", address, size, nothing, handle, ctypes.c_ulonglong(0))
        access = _Access(_Location(_ON_DEVICE, self._index), _READ_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012  (as others read it)
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
            }

        return torch.as_tensor(Memory(), device=self._device)

    @property
    def _allocation(self) -> _Allocation:
        return _Allocation(_PINNED, _AS_DESCRIPTOR, _Location(_ON_DEVICE, self._index), None, _Flags())

    def _whole(self, nbytes: int) -> ctypes.c_size_t:
        """As many bytes as the driver hands out at a time."""
        unit = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._allocation), ctypes.c_int(0)
        )
        return ctypes.c_size_t(-(-max(1, nbytes) // unit.value) * unit.value)

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._calls, name)
        if not (code := function(*arguments)):
            return
        if code == _OUT_OF_MEMORY:
            raise OSError(errno.ENOMEM, "the GPU has no more memory free")
        raise LaunchError(
            f"data: via=arena shares memory of {self.name}, but its driver answers {name} with error {code}; use "
            "via=backend."
        )
