"""One checkpoint's folder: a file of tensors for each part, and the manifest, which is written last."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Collection
from pathlib import Path

import torch
import xxhash
from torch import nn

from shoal.checkpoint.block import Block
from shoal.checkpoint.fields import Malformed
from shoal.checkpoint.listing import read_manifest, torn
from shoal.checkpoint.manifest import PARTS, Manifest, PartFile
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.checkpoint.snapshot import PackedSnapshot
from shoal.checkpoint.wholeness import PIECE_BYTES, file_name, open_part, read_chunk
from shoal.errors import CheckpointError
from shoal.observe.checkpoint_names import MANIFEST

CHUNK_BYTES = 64 << 20


def write_folder(path: Path, snapshot: PackedSnapshot, *, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    """Make the folder and write everything, durably; it is whole once the manifest is there."""
    begin = time.perf_counter()
    path.mkdir()
    files = {
        part: PartFile(
            nbytes=block.memory.nbytes,
            checksums=_write_chunks(path / file_name(part), block.memory, chunk_bytes),
            locations=tuple(block.locations),
        )
        for part, block in snapshot.blocks.items()
    }
    manifest = Manifest(
        step=snapshot.step,
        digest=digest(snapshot.model),
        saved_at=time.time(),
        seconds=time.perf_counter() - begin,
        chunk_bytes=chunk_bytes,
        files=files,
        facts=snapshot.facts,
    )
    write_manifest(path, manifest)
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """All data is on the disk: say so, which makes the folder whole."""
    part = path / f".{MANIFEST}.part"
    with part.open("wb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)
    part.replace(path / MANIFEST)
    sync_folder(path)


def read_folder(path: Path, parts: Collection[str] = PARTS) -> PackedSnapshot:
    """Read these parts and check every chunk of them; the others are left empty."""
    manifest = read_manifest(path)
    blocks = {part: Block.empty() for part in PARTS}
    for part in parts:
        try:
            memory = _read_chunks(path / file_name(part), manifest.files[part], manifest.chunk_bytes)
        except (OSError, Malformed) as error:
            raise torn(path, file_name(part), error) from None
        blocks[part] = Block(memory, manifest.files[part].locations)
    snapshot = PackedSnapshot.of(blocks, step=manifest.step, facts=manifest.facts)
    if "model" in parts and digest(snapshot.model) != manifest.digest:
        raise torn(path, "model", Malformed("it does not have its digest"))
    return snapshot


def sync_folder(path: Path) -> None:
    """Make sure that names in this folder outlast a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_chunks(path: Path, memory: torch.Tensor, chunk_bytes: int) -> tuple[str, ...]:
    """Write the memory as it is; returns each chunk's checksum."""
    if not memory.numel():
        return ()
    checksums = []
    view = memory.numpy().data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _bypass_cache(fd, True)
        for start in range(0, len(view), chunk_bytes):
            chunk = view[start : start + chunk_bytes]
            total = xxhash.xxh3_128()
            # A checksum keeps Python's lock, and training in this process waits for it; a write does not.
            for piece in (chunk[at : at + PIECE_BYTES] for at in range(0, len(chunk), PIECE_BYTES)):
                total.update(piece)
                _write_all(fd, piece)
            checksums.append(total.hexdigest())
        os.fsync(fd)
    finally:
        os.close(fd)
    return tuple(checksums)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _bypass_cache(fd, False):
                raise


def _bypass_cache(fd: int, wanted: bool) -> bool:
    """Let the disk read straight from our memory, or not: copies into the page cache cost the trainers' cores.

    Returns whether that changed anything; some file systems cannot.
    """
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    after = before | os.O_DIRECT if wanted else before & ~os.O_DIRECT
    if after == before:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, after)
    except OSError:
        return False
    return True


def _read_chunks(path: Path, expected: PartFile, chunk_bytes: int) -> torch.Tensor:
    if not expected.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with open_part(path, expected) as file:
        memory = torch.empty(expected.nbytes, dtype=torch.uint8)
        view = memory.numpy().data
        for index in range(len(expected.checksums)):
            read_chunk(file, view[index * chunk_bytes : (index + 1) * chunk_bytes], expected, index)
    return memory


def load_model(path: Path, module: nn.Module) -> None:
    """Give a module of the same shape the values of a saved model, or of a checkpoint's folder."""
    tensors = read_folder(path, ["model"]).model if path.is_dir() else load_tensors(path)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit the task's model; use the arguments it was trained with. ({error})"
        ) from None
