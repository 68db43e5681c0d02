"""Write a model's file tensor by tensor: nobody has to hold them all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from shoal.arena.tensors import as_bytes
from shoal.checkpoint.block import memory_key
from shoal.checkpoint.freeing import Shelf
from shoal.checkpoint.model_file import add_to_digest
from shoal.errors import CheckpointError
from shoal.observe.disk import is_full, writing

_ALIGNMENT = 8
LENGTH_BYTES = 8
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True, kw_only=True)
class TensorLooks:
    """All of a tensor but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLooks:
        """Those of a tensor."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    def room(self) -> torch.Tensor:
        """A tensor in the host's memory that has them, and no values yet."""
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorStream:
    """Tensors one after the other."""

    looks: Mapping[str, TensorLooks]
    """Of all that will come."""
    tensors: Iterator[tuple[str, torch.Tensor]]
    """In the order of their sorted names, in which a digest takes them."""
    same: Mapping[str, str] = field(default_factory=dict)
    """By name, where several mean one tensor, as those of tied weights do: the one that stands for all of them.
    It comes once for each name."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorStream:
        """Tensors that are all there."""
        looks = {name: TensorLooks.of(tensor) for name, tensor in tensors.items()}
        first: dict[tuple[Any, ...], str] = {}
        same = {name: first.setdefault(memory_key(tensor), name) for name, tensor in tensors.items()}
        return cls(looks=looks, tensors=iter(sorted(tensors.items(), key=lambda item: item[0])), same=same)

    def drain(self) -> None:
        """Take part in what makes the tensors, and keep none."""
        for _ in self.tensors:
            pass


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, shelf: Shelf | None = None, **metadata: str
) -> str:
    """Write tensors that are all there, as `save_stream` does."""
    return save_stream(path, TensorStream.of(tensors), shelf=shelf, **metadata)


def save_stream(path: Path, stream: TensorStream, *, shelf: Shelf | None = None, **metadata: str) -> str:
    """Write a safetensors file in one move, with one tensor at a time in memory; returns the digest, which the
    file carries too.

    Where the disk is full, room is made on the shelf.
    """
    looks, offsets = stream.looks, _lay_out(stream.looks)
    part = path.with_name(f".{path.name}.part")
    total = xxhash.xxh3_128()
    with writing(path.parent):
        try:
            with part.open("wb") as file:
                # Tensors come once: that there is room for all of them is seen to before the first.
                _reserve(file, sum(look.nbytes for look in looks.values()), shelf)
                begin = _write_header(file, looks, offsets, {"digest": total.hexdigest(), **metadata})
                for name, (found, tensor) in zip(sorted(looks), stream.tensors, strict=True):
                    values = checked(name, looks[name], found, tensor)
                    add_to_digest(total, name, values)
                    file.seek(begin + offsets[name])
                    if values.numel():
                        file.write(as_bytes(values).numpy().data)
                file.seek(0)
                _write_header(file, looks, offsets, {"digest": total.hexdigest(), **metadata})
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return str(total.hexdigest())


def _reserve(file: BinaryIO, nbytes: int, shelf: Shelf | None) -> None:
    while nbytes:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        except OSError as error:
            if not is_full(error):
                return  # It cannot be done here; writing will tell.
            if shelf is None or not shelf.free_one():
                raise


def checked(name: str, looks: TensorLooks, found: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that came, side by side in the host's memory; it must be the one that was due."""
    if found != name or TensorLooks.of(tensor) != looks:
        raise CheckpointError(
            f"Saving: {name!r} of {looks} was due, but {found!r} of {TensorLooks.of(tensor)} came; "
            "the model was changed while it was saved."
        )
    return tensor.detach().cpu().contiguous()


def _lay_out(looks: Mapping[str, TensorLooks]) -> dict[str, int]:
    """Where each tensor begins: wider dtypes first, so that every one lies at a multiple of its own width."""
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(looks, key=lambda name: (-looks[name].dtype.itemsize, name)):
        offsets[name] = end
        end += looks[name].nbytes
    return offsets


def _write_header(
    file: BinaryIO, looks: Mapping[str, TensorLooks], offsets: Mapping[str, int], metadata: Mapping[str, str]
) -> int:
    """What lies where, as the format wants it; returns where the values begin."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name in sorted(offsets, key=lambda name: (offsets[name], looks[name].nbytes)):
        look = looks[name]
        if look.dtype not in DTYPE_CODES:
            raise CheckpointError(f"Saving: {name!r} has dtype {look.dtype}, which safetensors files cannot hold.")
        header[name] = {
            "dtype": DTYPE_CODES[look.dtype],
            "shape": list(look.shape),
            "data_offsets": [offsets[name], offsets[name] + look.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    return LENGTH_BYTES + len(text)
