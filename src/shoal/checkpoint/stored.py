"""Saved tensors that stay in their file until somebody asks for one; nothing is mapped, nothing is unpickled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import torch

from shoal.checkpoint.fields import Malformed
from shoal.checkpoint.listing import torn
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.wholeness import check_chunk, file_name, open_part


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
