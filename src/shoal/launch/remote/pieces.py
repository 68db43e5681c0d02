"""Files over a line between hosts: cut into pieces at one end, put together at the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from shoal.comm.host_words import FilePiece, LogPiece
from shoal.errors import ProtocolError
from shoal.observe.checkpoint_names import MANIFEST

PIECE_BYTES = 1 << 20
KEPT = "kept"
"""The folder, in a host's own one, for copies of checkpoints that others have made."""


def cut(file: BinaryIO, name: str) -> Iterator[FilePiece]:
    """A file, which is closed then, in pieces, under the name that it gets there."""
    with file:
        offset = 0
        while True:
            data = file.read(PIECE_BYTES)
            is_last = len(data) < PIECE_BYTES
            yield FilePiece(name=name, offset=offset, data=data, is_last=is_last)
            if is_last:
                return
            offset += len(data)


def cut_folder(folder: Path, name: str) -> Iterator[FilePiece]:
    """The files of a checkpoint, all of which are opened at once: it may be removed any time. What makes it one
    comes last."""
    files = [(path.open("rb"), path.name) for path in sorted(folder.iterdir(), key=_comes_last)]
    return chain.from_iterable([cut(file, f"{name}/{own}") for file, own in files])


def _comes_last(path: Path) -> bool:
    return path.name == MANIFEST


class Arrivals:
    """Where files come to. Each has its name once it is whole, and is on the disk then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, piece: FilePiece) -> None:
        """Put one more piece into its file. `ProtocolError` where that would lie elsewhere; `OSError` where the
        disk refuses it."""
        path = self.inside(piece.name)
        part = path.with_name(f".{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(part, piece.data, piece.offset, begins=piece.offset == 0, syncs=piece.is_last)
        if piece.is_last:
            part.replace(path)

    def extend(self, piece: LogPiece) -> None:
        """Put what a process has printed behind what it had printed before."""
        path = self.inside(piece.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, piece.data, piece.offset)

    def inside(self, name: str) -> Path:
        """The path of a file of this name; `ProtocolError` where it would lie elsewhere."""
        written = PurePosixPath(name)
        if written.is_absolute() or ".." in written.parts or not written.parts:
            raise ProtocolError(f"A file called {name!r} would not lie in {self._folder}; it is refused.")
        return self._folder / written


def _write(path: Path, data: bytes, offset: int, *, begins: bool = False, syncs: bool = False) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if begins else 0)
    fd = os.open(path, flags, 0o644)
    try:
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
        if syncs:
            os.fsync(fd)
    finally:
        os.close(fd)
