"""Files over a line between hosts: cut into pieces at one end, put together at the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from shoal.comm.host_words import FilePiece
from shoal.errors import ProtocolError

PIECE_BYTES = 1 << 20


def cut(file: Path, name: str) -> Iterator[FilePiece]:
    """A file in pieces, under the name that it gets there."""
    with file.open("rb") as opened:
        offset = 0
        while True:
            data = opened.read(PIECE_BYTES)
            is_last = len(data) < PIECE_BYTES
            yield FilePiece(name=name, offset=offset, data=data, is_last=is_last)
            if is_last:
                return
            offset += len(data)


class Arrivals:
    """Where files come to. Each has its name once it is whole, and is on the disk then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, piece: FilePiece) -> None:
        """Put one more piece into its file. `ProtocolError` where that would lie elsewhere; `OSError` where the
        disk refuses it."""
        path = self._inside(piece.name)
        part = path.with_name(f".{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if piece.offset == 0 else 0)
        fd = os.open(part, flags, 0o644)
        try:
            _write_at(fd, piece.data, piece.offset)
            if piece.is_last:
                os.fsync(fd)
        finally:
            os.close(fd)
        if piece.is_last:
            part.replace(path)

    def _inside(self, name: str) -> Path:
        written = PurePosixPath(name)
        if written.is_absolute() or ".." in written.parts or not written.parts:
            raise ProtocolError(f"A file called {name!r} would not lie in {self._folder}; it is refused.")
        return self._folder / written


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
