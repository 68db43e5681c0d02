"""A checkpoint of a state that comes tensor by tensor: nobody has to hold all of it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from shoal.arena.tensors import as_bytes
from shoal.checkpoint.block import dtype_name, file_bytes, round_up
from shoal.checkpoint.folder import CHUNK_BYTES, write_manifest
from shoal.checkpoint.manifest import ALIGNMENT, Location, Manifest, PartFile
from shoal.checkpoint.model_file import add_to_digest
from shoal.checkpoint.model_stream import TensorStream, checked
from shoal.checkpoint.wholeness import PIECE_BYTES, file_name


@dataclass(frozen=True, kw_only=True)
class StreamedState:
    """What a `Snapshot` holds, as it comes."""

    step: int
    """Committed steps."""
    model: TensorStream
    optimizer: TensorStream
    losses: torch.Tensor
    facts: Mapping[str, Any]

    def parts(self) -> Iterator[tuple[str, TensorStream]]:
        """By part, in the order in which everybody gives theirs."""
        yield "model", self.model
        yield "optimizer", self.optimizer
        yield "losses", TensorStream.of({"losses": self.losses})
        yield "rng", TensorStream.of({})


class StreamedFolder:
    """A checkpoint's folder that is written while the tensors come, and made whole afterwards.

    Where the disk refuses, what comes is taken all the same: others wait until it is. `finish` says why.
    """

    def __init__(self, path: Path, step: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.step = step
        self._chunk_bytes = chunk_bytes
        self._began = time.perf_counter()
        self._total = xxhash.xxh3_128()
        self._parts: dict[str, PartWriter] = {}
        self._facts: Mapping[str, Any] = {}
        self._refusal: Exception | None = None

    def attempt(self, act: Callable[..., object], *args: object) -> None:
        """Do what the disk may refuse, unless it has refused something already."""
        if self._refusal is None:
            try:
                act(*args)
            except Exception as error:
                self._refusal = error

    def take(self, state: StreamedState) -> None:
        """Write the values of all parts as they come; the disk may have them later."""
        self._facts = state.facts
        self.attempt(self.path.mkdir)
        for part, stream in state.parts():
            self.attempt(self._open, part, stream)
            for name, (found, tensor) in zip(sorted(stream.looks), stream.tensors, strict=True):
                values = checked(name, stream.looks[name], found, tensor)
                if part == "model":
                    add_to_digest(self._total, name, values)
                self.attempt(self._put, part, name, values)
            self.attempt(self._complete, part)

    def _open(self, part: str, stream: TensorStream) -> None:
        self._parts[part] = PartWriter(self.path / file_name(part), lay_out_stream(stream), self._chunk_bytes)

    def _put(self, part: str, name: str, values: torch.Tensor) -> None:
        self._parts[part].put(name, values)

    def _complete(self, part: str) -> None:
        self._parts[part].complete()

    def finish(self) -> Manifest:
        """Have everything on the disk, and then say so; removes the folder where it was refused."""
        try:
            if self._refusal is not None:
                raise self._refusal
            manifest = Manifest(
                step=self.step,
                digest=str(self._total.hexdigest()),
                saved_at=time.time(),
                seconds=time.perf_counter() - self._began,
                chunk_bytes=self._chunk_bytes,
                files={part: writer.sync() for part, writer in self._parts.items()},
                facts=self._facts,
            )
            write_manifest(self.path, manifest)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return manifest


def lay_out_stream(stream: TensorStream) -> tuple[Location, ...]:
    """Where each tensor comes to lie, in the order in which they come; two names of one get one location."""
    offsets: dict[str, int] = {}
    locations = []
    end = 0
    for name in sorted(stream.looks):
        looks, first = stream.looks[name], stream.same.get(name, name)
        if first not in offsets:
            offsets[first] = end
            end = round_up(end + looks.nbytes, ALIGNMENT)
        dtype = dtype_name(name, looks.dtype)
        locations.append(
            Location(name=name, dtype=dtype, shape=looks.shape, offset=offsets[first], nbytes=looks.nbytes)
        )
    return tuple(locations)


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
            self._write(as_bytes(values).numpy().data)

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
