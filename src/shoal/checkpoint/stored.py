"""Saved tensors that stay in their file until somebody asks for one; nothing is mapped, nothing is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from shoal.checkpoint.fields import Fields, Malformed
from shoal.checkpoint.listing import torn
from shoal.checkpoint.manifest import MOST_BYTES, Manifest
from shoal.checkpoint.model_file import add_to_digest
from shoal.checkpoint.model_stream import DTYPE_CODES, LENGTH_BYTES
from shoal.checkpoint.wholeness import check_chunk, file_name, open_part
from shoal.errors import CheckpointError

_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class ValuesFile(Protocol):
    """Bytes that can be read from anywhere in them."""

    def read_into(self, offset: int, values: torch.Tensor) -> torch.Tensor:
        """Fill these values, which lie side by side in memory."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor's looks, and where its values are, in the order of its elements."""

    file: ValuesFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class PartReader:
    """A part of a checkpoint. A chunk is checked before anything of it is used, and only those that are."""

    def __init__(self, path: Path, part: str, manifest: Manifest) -> None:
        self._path = path
        self._name = file_name(part)
        self._expected = manifest.files[part]
        self._chunk_bytes = manifest.chunk_bytes
        self._checked: set[int] = set()
        self._file: BufferedReader | None = None
        if self._expected.nbytes:
            try:
                self._file = open_part(path / self._name, self._expected)
            except (OSError, Malformed) as error:
                raise torn(path, self._name, error) from None

    def tensors(self) -> dict[str, StoredTensor]:
        """What is in it, by name."""
        return {
            location.name: StoredTensor(
                file=self, offset=location.offset, dtype=getattr(torch, location.dtype), shape=location.shape
            )
            for location in self._expected.locations
        }

    def read_into(self, offset: int, values: torch.Tensor) -> torch.Tensor:
        if not values.numel():
            return values
        assert self._file is not None, "a part with values has a file"
        first, last = offset // self._chunk_bytes, (offset + values.nbytes - 1) // self._chunk_bytes
        try:
            for index in sorted(set(range(first, last + 1)) - self._checked):
                check_chunk(self._file, self._expected, self._chunk_bytes, index)
                self._checked.add(index)
            return read_values(self._file, offset, values)
        except (OSError, Malformed) as error:
            raise torn(self._path, self._name, error) from None


def read_values(file: BufferedReader, offset: int, values: torch.Tensor) -> torch.Tensor:
    """Fill these values, which lie side by side in memory, from there on."""
    left = values.detach().as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data
    while left:
        found = os.preadv(file.fileno(), [left], offset)
        if not found:
            raise Malformed("it ends too early")
        left, offset = left[found:], offset + found
    return values


class ModelReader:
    """What `save_tensors` and `save_stream` write. It is read once, tensor by tensor, to see that it still is what
    was written."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"There is no saved model at {path}; train first, or name another run.")
        try:
            self._file = path.open("rb")
            header, begin = self._read_header()
            self._tensors = dict(self._locations(header, begin))
            expected = header.inner(_METADATA).values.get("digest") if _METADATA in header.values else None
        except (OSError, Malformed) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file ({error}); train or copy it again."
            ) from None
        if expected is not None and self._digest() != expected:
            raise CheckpointError(f"{path} was changed since it was written: its digest is not {expected}.")

    def tensors(self) -> dict[str, StoredTensor]:
        """What is in it, by name."""
        return self._tensors

    def read_into(self, offset: int, values: torch.Tensor) -> torch.Tensor:
        return read_values(self._file, offset, values)

    def _read_header(self) -> tuple[Fields, int]:
        """What lies where, and where the values begin."""
        length = int.from_bytes(self._file.read(LENGTH_BYTES), "little")
        if not 0 < length <= _MOST_HEADER_BYTES:
            raise Malformed("its header has an impossible length")
        try:
            return Fields("the header", json.loads(self._file.read(length))), LENGTH_BYTES + length
        except (ValueError, RecursionError):
            raise Malformed("its header is not JSON") from None

    def _locations(self, header: Fields, begin: int) -> Iterator[tuple[str, StoredTensor]]:
        size = os.fstat(self._file.fileno()).st_size - begin
        for name in header.values.keys() - {_METADATA}:
            fields = header.inner(name)
            code, shape = fields.text("dtype"), fields.counts("shape", MOST_BYTES)
            if code not in _DTYPES:
                raise Malformed(f"tensor {name!r} has the unknown dtype {code!r}")
            start, stop = (*fields.counts("data_offsets", max(size, 0)), -1, -1)[:2]
            if stop - start != prod(shape) * _DTYPES[code].itemsize:
                raise Malformed(f"tensor {name!r} lies outside of the file, or has another length than its shape")
            yield name, StoredTensor(file=self, offset=begin + start, dtype=_DTYPES[code], shape=shape)

    def _digest(self) -> str:
        total = xxhash.xxh3_128()
        for name, stored in sorted(self._tensors.items()):
            values = torch.empty(stored.shape, dtype=stored.dtype)
            add_to_digest(total, name, self.read_into(stored.offset, values) if values.numel() else values)
        return str(total.hexdigest())
