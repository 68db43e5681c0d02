"""Named tensors: what they are like, whether others fit them, and how they travel.

A tensor travels in pieces of a few MiB, each a frame of its own, or what a compression made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.codec import Frame
from shoal.comm.compression import Compression, Packed
from shoal.comm.compression.base import take_frames, take_tensor
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


@dataclass(frozen=True, kw_only=True)
class PlainBulk:
    """Tensors as they travel: the parts of a message that carry them."""

    packing: Sequence[Any] = ()
    """Per piece None where its frame is the piece itself, else [number of frames, small values]."""
    frames: Sequence[Frame] = ()


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
            raise SpecError(f"Parameter {name!r} must be sent as a tensor, found {type(value).__name__}.")
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
    """The tensors as they travel; without compression the frames are views of their memory."""
    packing: list[Any] = []
    frames: list[Frame] = []
    for name, value in values.items():
        for index, piece in enumerate(pieces(value.detach().cpu().contiguous())):
            if compression is None or not piece.is_floating_point():
                packing.append(None)
                frames.append(piece)
            else:
                packed = compression.encode((name, index), piece)
                packing.append([len(packed.frames), packed.fields])
                frames.extend(packed.frames)
    return PlainBulk(packing=packing, frames=frames)


def unpack(
    bulk: PlainBulk, names: Iterable[str], specs: Specs, compression: Compression | None = None
) -> dict[str, Tensor]:
    """New tensors of these names from what arrived; `ProtocolError` unless it is exactly that."""
    arrived = _Arrived(bulk)
    values: dict[str, Tensor] = {}
    for name in names:
        values[name] = specs[name].empty()
        for piece in pieces(values[name]):
            packed, is_compressed = arrived.next_piece()
            if not is_compressed:
                (frame,) = take_frames(packed, 1)
                piece.copy_(take_tensor(frame, piece.dtype, tuple(piece.shape)))
            elif compression is None:
                raise ProtocolError("A tensor arrived compressed, but nothing says how.")
            else:
                compression.decode(packed, piece)
    arrived.require_nothing_left()
    return values


class _Arrived:
    """What arrived, to be taken piece by piece."""

    def __init__(self, bulk: PlainBulk) -> None:
        self._packing = list(bulk.packing)[::-1]
        self._frames = list(bulk.frames)[::-1]

    def next_piece(self) -> tuple[Packed, bool]:
        """The next piece, and whether it is compressed."""
        if not self._packing:
            raise ProtocolError("Fewer pieces of tensors arrived than their names promise.")
        match self._packing.pop():
            case None:
                return self._take(1, {}), False
            case [int(num_frames), dict(fields)] if num_frames > 0:
                return self._take(num_frames, fields), True
            case _:
                raise ProtocolError("A piece of a tensor is neither plain nor [number of frames, values].")

    def require_nothing_left(self) -> None:
        if self._packing or self._frames:
            raise ProtocolError("More pieces of tensors arrived than their names promise.")

    def _take(self, num_frames: int, fields: dict[str, Any]) -> Packed:
        if num_frames > len(self._frames):
            raise ProtocolError("Fewer frames arrived than their pieces promise.")
        return Packed(fields, tuple(self._frames.pop() for _ in range(num_frames)))
