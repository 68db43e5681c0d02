"""Values of tensors in a file that has no name and ends with this process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from shoal.observe.disk import writing


class ScratchFile:
    """Read and written in place; nothing is mapped, for mapped files count as a process's own memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing(folder):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives as long as this
        self._end = 0

    def append(self, values: torch.Tensor) -> int:
        """Where these values, which lie side by side in memory, are from now on."""
        offset = self._end
        self._end += values.nbytes
        self.write(offset, values)
        return offset

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Replace what is there."""
        left = _as_bytes(values)
        with writing(self._folder):
            while left:
                written = os.pwrite(self._file.fileno(), left, offset)
                left, offset = left[written:], offset + written

    def read_into(self, offset: int, values: torch.Tensor) -> torch.Tensor:
        """Fill these values, which lie side by side in memory."""
        left = _as_bytes(values)
        while left:
            found = os.preadv(self._file.fileno(), [left], offset)
            assert found, "nothing is read that was not written"
            left, offset = left[found:], offset + found
        return values


def _as_bytes(values: torch.Tensor) -> memoryview:
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().as_strided((values.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
