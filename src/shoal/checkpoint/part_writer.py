"""One data file of a checkpoint, written from its first byte to its last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from shoal.checkpoint.block import file_bytes
from shoal.checkpoint.manifest import Location, PartFile
from shoal.checkpoint.wholeness import PIECE_BYTES


class PartWriter:
    """Takes tensors in the order of their locations. A part without values gets no file."""

    def __init__(self, path: Path, locations: Sequence[Location], chunk_bytes: int) -> None:
        self._locations = {location.name: location for location in locations}
        self._nbytes = file_bytes(locations)
        self._chunk_bytes = chunk_bytes
        self._checksums: list[str] = []
        self._chunk = xxhash.xxh3_128()
        self._at = 0
        self._file = path.open("xb", buffering=0) if self._nbytes else None

    def put(self, name: str, values: torch.Tensor) -> None:
        """Write the next tensor, which lies side by side in the host's memory; where it shares another's
        location, it may be there already."""
        location = self._locations[name]
        if location.nbytes and location.offset >= self._at:
            self._fill(location.offset)
            self._write(values.view(-1).view(torch.uint8).numpy().data)

    def complete(self) -> None:
        """No more will come."""
        self._fill(self._nbytes)
        if self._at % self._chunk_bytes:
            self._checksums.append(self._chunk.hexdigest())

    def sync(self) -> PartFile:
        """Wait until the disk has everything; what is now in the file."""
        if self._file is not None:
            with self._file as file:
                os.fsync(file.fileno())
        return PartFile(
            nbytes=self._nbytes, checksums=tuple(self._checksums), locations=tuple(self._locations.values())
        )

    def _fill(self, until: int) -> None:
        """Zeros between tensors, so that equal states make equal files."""
        self._write(memoryview(bytes(until - self._at)))

    def _write(self, data: memoryview) -> None:
        assert self._file is not None or not data
        while data:
            room = self._chunk_bytes - self._at % self._chunk_bytes
            piece = data[: min(room, PIECE_BYTES)]
            written = self._file.write(piece) if self._file is not None else 0
            self._chunk.update(piece[:written])
            self._at += written or 0
            data = data[written:]
            if self._at % self._chunk_bytes == 0:
                self._checksums.append(self._chunk.hexdigest())
                self._chunk = xxhash.xxh3_128()
