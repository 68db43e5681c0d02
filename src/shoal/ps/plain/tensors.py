"""Tensors, some of them named: what they are like, whether others fit them, and how they travel.

A tensor travels in pieces, each a frame of its own, or what a compression made of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.codec import Frame
from shoal.comm.compression import Compression, Packed
from shoal.comm.compression.base import take_tensor
from shoal.errors import ProtocolError, SpecError, unknown

PIECE_BYTES = 4 << 20
"""The wire is fastest with frames of 1 to 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a tensor is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What this tensor is like."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """The size of such a tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """New memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype)

    def to_plain(self) -> list[Any]:
        """The spec as plain data."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape)]

    @classmethod
    def from_plain(cls, plain: object) -> TensorSpec:
        """The spec that `to_plain` gave; `ProtocolError` for anything else."""
        match plain:
            case [str(name), list(shape)] if all(type(size) is int and size >= 0 for size in shape):
                dtype = getattr(torch, name, None)
            case _:
                dtype = None
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError("A parameter is not described as [type, shape].")
        return cls(dtype=dtype, shape=tuple(shape))

    def __str__(self) -> str:
        name, shape = self.to_plain()
        return f"{name} {shape}"


Specs = Mapping[str, TensorSpec]
Piece = Frame | Packed
"""As it is, or compressed."""


@dataclass(frozen=True, kw_only=True)
class PlainBulk:
    """Tensors as they travel: the parts of a message that carry them."""

    packing: Sequence[Any] = ()
    """Per piece None where its frame is the piece itself, else [number of frames, small values]."""
    frames: Sequence[Frame] = ()

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> PlainBulk:
        """These pieces; without compression the frames are views of their memory."""
        packing: list[Any] = []
        frames: list[Frame] = []
        for piece in pieces:
            if isinstance(piece, Packed):
                packing.append([len(piece.frames), piece.fields])
                frames.extend(piece.frames)
            else:
                packing.append(None)
                frames.append(piece)
        return cls(packing=packing, frames=frames)

    def pieces(self) -> list[Piece]:
        """The pieces again; `ProtocolError` unless the frames are exactly those of the packing."""
        found: list[Piece] = []
        at = 0
        for each in self.packing:
            match each:
                case None if at < len(self.frames):
                    found.append(self.frames[at])
                    at += 1
                case [int(num_frames), dict(fields)] if 0 < num_frames <= len(self.frames) - at:
                    found.append(Packed(fields, tuple(self.frames[at : at + num_frames])))
                    at += num_frames
                case _:
                    raise ProtocolError("A piece of a tensor is neither a frame nor [number of frames, values].")
        if at < len(self.frames):
            raise ProtocolError("More frames arrived than the pieces of tensors promise.")
        return found


def packed(piece: Tensor, compression: Compression | None, key: Hashable) -> Piece:
    """A piece as it travels; `key` names it from one time to the next."""
    if compression is None or not piece.is_floating_point():
        return piece
    return compression.encode(key, piece)


def fill(room: Tensor, piece: Piece, compression: Compression | None) -> None:
    """Write what a piece holds; `ProtocolError` unless it is exactly that."""
    if not isinstance(piece, Packed):
        room.copy_(take_tensor(piece, room.dtype, tuple(room.shape)))
    elif compression is None:
        raise ProtocolError("A tensor arrived compressed, but nothing says how.")
    else:
        compression.decode(piece, room)


def require_known(names: Iterable[str], specs: Specs) -> None:
    """`SpecError` for a name that is not there."""
    for name in names:
        if name not in specs:
            raise unknown("parameter", name, specs)


def require_fit(values: Mapping[str, Tensor], specs: Specs) -> None:
    """`SpecError` unless every tensor is one of those that are there, in type and shape."""
    require_known(values, specs)
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise SpecError(
                f"Parameter {name!r} must be sent as a tensor, found {type(value).__name__}; make it one."
            )
        if value.layout != torch.strided:
            raise SpecError(
                f"Parameter {name!r} must be sent dense, found {value.layout}; call .to_dense() first."
            )
        if (found := TensorSpec.of(value)) != specs[name]:
            raise SpecError(
                f"Parameter {name!r} was sent as {found}, but the server has {specs[name]}; send one like it."
            )


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a contiguous tensor, in order: some rows each where it has rows, so that matrices stay such."""
    if not tensor.numel():
        return [tensor.reshape(-1)]
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(-1)
    if rows[0].nbytes > PIECE_BYTES:
        rows = tensor.reshape(-1)
    return rows.split(max(1, PIECE_BYTES // rows[0].nbytes))


def pack(values: Mapping[str, Tensor], compression: Compression | None = None) -> PlainBulk:
    """The tensors as they travel."""
    return PlainBulk.of(
        packed(piece, compression, (name, index))
        for name, value in values.items()
        for index, piece in enumerate(pieces(value.detach().cpu().contiguous()))
    )


def unpack(
    bulk: PlainBulk, names: Iterable[str], specs: Specs, compression: Compression | None = None
) -> dict[str, Tensor]:
    """New tensors of these names from what arrived; `ProtocolError` unless it is exactly that."""
    arrived, values = bulk.pieces(), {name: specs[name].empty() for name in names}
    rooms = [room for value in values.values() for room in pieces(value)]
    if len(rooms) != len(arrived):
        raise ProtocolError(f"{len(rooms)} pieces of tensors were to arrive, found {len(arrived)}.")
    for room, piece in zip(rooms, arrived, strict=True):
        fill(room, piece, compression)
    return values
