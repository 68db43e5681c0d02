"""The list of all that a checkpoint holds. Written last; read as what anybody may have put there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from shoal.checkpoint.fields import Fields, Malformed

VERSION = 1
PARTS = ("model", "optimizer", "losses", "rng")
"""The files of a checkpoint; no other name is read."""
ALIGNMENT = 64
"""Bytes: where a tensor may begin, so that vector instructions can read it in location."""
PAGE_BYTES = 4096
MOST_BYTES = 1 << 50
MOST_DIMS = 64
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_HEAD, _MIDDLE, _TAIL = b'{"checksum": "', b'", "manifest": ', b"}\n"
_CHECKSUM_CHARS = 32


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a tensor lies in its part's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """One data file."""

    nbytes: int
    checksums: tuple[str, ...]
    """Of each chunk, by xxh3_128."""
    locations: tuple[Location, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    digest: str
    """Names the whole model, as `digest` does for a saved one."""
    saved_at: float
    """Seconds since 1970."""
    seconds: float
    """What writing the data took."""
    chunk_bytes: int
    files: Mapping[str, PartFile]
    """By part; every part is there."""
    facts: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied ones count once."""
        return sum(
            nbytes
            for file in self.files.values()
            for _, nbytes in {(location.offset, location.nbytes) for location in file.locations}
        )

    def to_bytes(self) -> bytes:
        """JSON with a checksum of every byte that matters."""
        body = json.dumps({"version": VERSION, **vars(self)}, default=_written, separators=(",", ":")).encode()
        return _HEAD + checksum(body).encode() + _MIDDLE + body + _TAIL


def _written(value: Any) -> dict[str, Any]:
    """As the file has it. It calls locations otherwise, and so do all that were written before."""
    fields = dict(vars(value))
    if isinstance(value, PartFile):
        fields["places"] = fields.pop("locations")
    return fields


def checksum(data: bytes | memoryview) -> str:
    """The checksum of manifests and chunks."""
    return str(xxhash.xxh3_128_hexdigest(data))


def parse_manifest(data: bytes) -> Manifest:
    """Check and read what `to_bytes` wrote; raises `Malformed` for anything else."""
    start = len(_HEAD) + _CHECKSUM_CHARS
    body = data[start + len(_MIDDLE) : -len(_TAIL)]
    frame = data[: len(_HEAD)], data[start : start + len(_MIDDLE)], data[-len(_TAIL) :]
    if frame != (_HEAD, _MIDDLE, _TAIL) or data[len(_HEAD) : start] != checksum(body).encode():
        raise Malformed("it does not have its checksum")
    try:
        fields = Fields("the manifest", json.loads(body))
    except (ValueError, RecursionError):
        raise Malformed("it is not JSON") from None
    if (version := fields.count("version", VERSION)) != VERSION:
        raise Malformed(f"it has format {version}, and only {VERSION} is known")
    chunk_bytes = fields.count("chunk_bytes", MOST_BYTES, least=1)
    files = fields.inner("files")
    files.require_keys(PARTS)
    return Manifest(
        step=fields.count("step", MOST_BYTES),
        digest=fields.text("digest"),
        saved_at=fields.seconds("saved_at"),
        seconds=fields.seconds("seconds"),
        chunk_bytes=chunk_bytes,
        files={part: _parse_file(files.inner(part), chunk_bytes) for part in PARTS},
        facts=fields.inner("facts").values,
    )


def _parse_file(fields: Fields, chunk_bytes: int) -> PartFile:
    nbytes = fields.count("nbytes", MOST_BYTES)
    checksums = fields.texts("checksums")
    if len(checksums) != -(-nbytes // chunk_bytes):
        raise Malformed(f"{fields.owner} has {len(checksums)} checksums for {nbytes} bytes")
    locations = tuple(_parse_location(location, nbytes) for location in fields.each("places"))
    if len({location.name for location in locations}) != len(locations):
        raise Malformed(f"{fields.owner} names a tensor twice")
    return PartFile(nbytes=nbytes, checksums=checksums, locations=locations)


def _parse_location(fields: Fields, file_bytes: int) -> Location:
    location = Location(
        name=fields.text("name"),
        dtype=fields.text("dtype"),
        shape=fields.counts("shape", MOST_BYTES),
        offset=fields.count("offset", file_bytes),
        nbytes=fields.count("nbytes", file_bytes),
    )
    owner = f"tensor {location.name!r}"
    if location.dtype not in ITEM_BYTES:
        raise Malformed(f"{owner} has the unknown dtype {location.dtype!r}")
    # Zeros hide how large the other sizes are; torch multiplies those, too.
    if len(location.shape) > MOST_DIMS or prod(size or 1 for size in location.shape) > MOST_BYTES:
        raise Malformed(f"{owner} has an impossible shape")
    if location.nbytes != prod(location.shape) * ITEM_BYTES[location.dtype]:
        raise Malformed(f"{owner} has {location.nbytes} bytes, which its shape {location.shape} does not need")
    if location.offset % ALIGNMENT or location.offset + location.nbytes > file_bytes:
        raise Malformed(f"{owner} lies outside of its file, or between two locations")
    return location
