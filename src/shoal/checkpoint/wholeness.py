"""Whether checkpoints are whole: every byte is read and checked. Quick to import: nothing here needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import xxhash

from shoal.checkpoint.fields import Malformed
from shoal.checkpoint.listing import open_inside, read_manifest, torn
from shoal.checkpoint.manifest import Manifest, PartFile, checksum
from shoal.errors import CheckpointError
from shoal.observe.checkpoint_names import step_folders

T = TypeVar("T")
PIECE_BYTES = 4 << 20
"""Read or written at once: a chunk is longer than some processes have room for."""


def newest_whole(folder: Path, read: Callable[[Path], T], report: Callable[[str], None]) -> T | None:
    """What `read` finds in the checkpoint of the highest step; `report` is told of those that it finds torn."""
    for path in reversed(step_folders(folder)):
        try:
            return read(path)
        except CheckpointError as error:
            report(f"{error} It was skipped.")
    return None


def check_folder(path: Path) -> Manifest:
    """A checkpoint's manifest, once all of its data was found to be as it says."""
    manifest = read_manifest(path)
    for part, expected in manifest.files.items():
        try:
            _check_file(path / file_name(part), expected, manifest.chunk_bytes)
        except (OSError, Malformed) as error:
            raise torn(path, file_name(part), error) from None
    return manifest


def file_name(part: str) -> str:
    """The data file of a part."""
    return f"{part}.bin"


def open_part(path: Path, expected: PartFile) -> BufferedReader:
    """A part's file, which is as long as it should be."""
    file = open_inside(path)
    found = os.fstat(file.fileno()).st_size
    if found != expected.nbytes:
        file.close()
        raise Malformed(f"it has {found} bytes, not {expected.nbytes}")
    return file


def read_chunk(file: BufferedReader, chunk: memoryview, expected: PartFile, index: int) -> None:
    """Fill the memory with a chunk of the file, and check it."""
    if file.readinto(chunk) != len(chunk) or checksum(chunk) != expected.checksums[index]:
        raise _broken(expected, index)


def check_chunk(file: BufferedReader, expected: PartFile, chunk_bytes: int, index: int) -> None:
    """Read a chunk of the file, piece by piece, and check it."""
    total = xxhash.xxh3_128()
    file.seek(index * chunk_bytes)
    left = min(chunk_bytes, expected.nbytes - index * chunk_bytes)
    room = memoryview(bytearray(min(PIECE_BYTES, left)))
    while left and (found := file.readinto(room[:left])):
        total.update(room[:found])
        left -= found
    if left or total.hexdigest() != expected.checksums[index]:
        raise _broken(expected, index)


def _check_file(path: Path, expected: PartFile, chunk_bytes: int) -> None:
    if not expected.nbytes:
        return
    with open_part(path, expected) as file:
        for index in range(len(expected.checksums)):
            check_chunk(file, expected, chunk_bytes, index)


def _broken(expected: PartFile, index: int) -> Malformed:
    return Malformed(f"chunk {index + 1} of {len(expected.checksums)} does not have its checksum")
