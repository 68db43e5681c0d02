"""A saved model's file, read tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
import xxhash

from shoal.checkpoint.fields import Fields, Malformed
from shoal.checkpoint.manifest import MOST_BYTES
from shoal.checkpoint.model_file import add_to_digest
from shoal.checkpoint.model_stream import DTYPE_CODES, LENGTH_BYTES
from shoal.checkpoint.stored import StoredTensor, read_values
from shoal.errors import CheckpointError

_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


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
