"""Messages as buffers: a msgpack header, then raw frames, each with its xxh3 checksum.

    buffer 0   8 bytes checksum of the rest | msgpack [kind, fields, [[dtype, shape, checksum], …]]
    buffer 1…  the frames: memory of tensors, or plain bytes (their dtype is empty)

What arrives is checked against bounds before memory is taken, and nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import torch
import xxhash

from shoal.arena.tensors import as_bytes
from shoal.errors import ProtocolError
from shoal.spec.told import read_value

Buffer = bytes | bytearray | memoryview
Frame = torch.Tensor | bytes | bytearray | memoryview

MAX_HEADER_BYTES = 4 << 20
MAX_FRAMES = 1 << 16
MAX_FRAME_BYTES = 64 << 20
MAX_DIMS = 16

_CHECKSUM_BYTES = 8
_PLAIN_BYTES = ""
# Types of whole bytes whose memory is all there is; quantised ones carry scales besides.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex128, torch.complex64),
    )
}


class TooLarge(ProtocolError):
    """A message has more frames, larger ones, or a longer header than may travel in one packet."""


@dataclass(frozen=True)
class Message:
    """One message: what it is, a few small values, and the bulk."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Plain data: text, numbers, booleans, bytes, None, lists and dicts of them."""
    frames: Sequence[Frame] = ()
    """CPU tensors of any type and shape, or bytes. Bytes arrive as a memoryview."""


class MessageForm:
    """What the fields of one kind of message have to be, but for those that travel in another way."""

    def __init__(self, cls: type, *, but: Collection[str] = ()) -> None:
        hints, small = get_type_hints(cls), [one for one in fields(cls) if one.name not in but]
        self._types = {one.name: hints[one.name] for one in small}
        self._items = {name: get_args(kind)[0] for name, kind in self._types.items() if get_origin(kind) is list}
        self._required = frozenset(
            one.name for one in small if one.default is MISSING and one.default_factory is MISSING
        )

    def plain(self, values: object) -> dict[str, Any]:
        """Its fields by their names."""
        return {name: getattr(values, name) for name in self._types}

    def read(self, kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Fields as they arrived; `ProtocolError` unless they are what `plain` gives."""
        if not self._required <= found.keys() <= self._types.keys():
            raise ProtocolError(f"A message {kind!r} has the fields {sorted(self._types)}, found others.")
        return {name: self._value(kind, name, value) for name, value in found.items()}

    def _value(self, kind: str, name: str, value: Any) -> Any:
        wanted = self._types[name]
        if type(value) is wanted:
            return value
        if type(value) is list and name in self._items and all(type(item) is self._items[name] for item in value):
            return value
        try:
            return read_value(value, wanted)
        except (TypeError, ValueError):
            raise ProtocolError(f"Field {name!r} of a message {kind!r} has the wrong type.") from None


def checksum(buffer: Buffer) -> int:
    """The checksum of every part of a message."""
    return xxhash.xxh3_64_intdigest(buffer)


def encode(message: Message) -> list[Buffer]:
    """The message as buffers. Frames are not copied: the buffers are views of their memory."""
    if len(message.frames) > MAX_FRAMES:
        raise TooLarge(f"A message holds at most {MAX_FRAMES} frames, found {len(message.frames)}.")
    views = [_view(frame) for frame in message.frames]
    if (largest := max((view.nbytes for view in views), default=0)) > MAX_FRAME_BYTES:
        raise TooLarge(
            f"A frame may have {MAX_FRAME_BYTES} bytes, but one of message {message.kind!r} has {largest}; "
            "cut it into several."
        )
    entries = [[*_describe(frame), checksum(view)] for frame, view in zip(message.frames, views, strict=True)]
    try:
        header = msgpack.packb([message.kind, message.fields, entries])
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"The fields of message {message.kind!r} must be plain data, found {error}; "
            "send tensors and arrays as frames."
        ) from None
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(
            f"The header of message {message.kind!r} may have {MAX_HEADER_BYTES} bytes, found {len(header)}; "
            "send the bulk as frames."
        )
    return [checksum(header).to_bytes(_CHECKSUM_BYTES, "little") + header, *views]


def decode(buffers: Sequence[Buffer]) -> Message:
    """The message that `encode` made; `ProtocolError` for anything else. Frames keep the buffers' memory."""
    if not 1 <= len(buffers) <= MAX_FRAMES + 1:
        raise ProtocolError(f"A message has 1 to {MAX_FRAMES + 1} parts, found {len(buffers)}.")
    kind, fields, entries = _decode_header(buffers[0])
    if len(entries) != len(buffers) - 1:
        raise ProtocolError(f"Message {kind!r} announces {len(entries)} frames, but {len(buffers) - 1} arrived.")
    return Message(kind, fields, [_decode_frame(e, b) for e, b in zip(entries, buffers[1:], strict=True)])


def _view(frame: Frame) -> memoryview:
    if not isinstance(frame, torch.Tensor):
        view = memoryview(frame)
        return view.cast("B") if view.nbytes else memoryview(b"")
    if frame.device.type != "cpu" or frame.layout != torch.strided:
        raise ProtocolError(
            f"A frame must be a dense CPU tensor, found {frame.layout} on {frame.device}; call .cpu() first."
        )
    plain = frame.detach().resolve_conj().resolve_neg().contiguous()
    return as_bytes(plain).numpy().data


def _describe(frame: Frame) -> tuple[str, list[int]]:
    if not isinstance(frame, torch.Tensor):
        return _PLAIN_BYTES, [memoryview(frame).nbytes]
    name = str(frame.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ProtocolError(f"Tensors of type {name} cannot be sent; dequantize them first.")
    return name, list(frame.shape)


def _decode_header(buffer: Buffer) -> tuple[str, dict[str, Any], list[Any]]:
    view = memoryview(buffer)
    if not _CHECKSUM_BYTES < view.nbytes <= MAX_HEADER_BYTES + _CHECKSUM_BYTES:
        raise ProtocolError(f"A header has 1 to {MAX_HEADER_BYTES} bytes, found {view.nbytes} in all.")
    if checksum(view[_CHECKSUM_BYTES:]) != int.from_bytes(view[:_CHECKSUM_BYTES], "little"):
        raise ProtocolError("The checksum of a message's header does not match.")
    try:
        kind, fields, entries = msgpack.unpackb(view[_CHECKSUM_BYTES:], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"A message's header cannot be read ({error}).") from None
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(entries, list)):
        raise ProtocolError("A message's header is not [kind, fields, frames].")
    return kind, fields, entries


def _decode_frame(entry: Any, buffer: Buffer) -> Frame:
    view = memoryview(buffer)
    dtype, shape, expected = _check_entry(entry)
    itemsize = dtype.itemsize if dtype is not None else 1
    if math.prod(shape) * itemsize != view.nbytes:
        raise ProtocolError(f"A frame of shape {shape} and type {dtype} cannot have {view.nbytes} bytes.")
    if checksum(view) != expected:
        raise ProtocolError("The checksum of a frame does not match.")
    if dtype is None:
        return view
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
    # Small frames may start anywhere inside a receive buffer; kernels want them aligned.
    aligned = flat if flat.data_ptr() % itemsize == 0 else flat.clone()
    return aligned.view(shape)


def _check_entry(entry: Any) -> tuple[torch.dtype | None, list[int], int]:
    """Type (None for plain bytes), shape and checksum of a frame, within bounds."""
    match entry:
        case [str(name), list(shape), int(expected)] if name == _PLAIN_BYTES or name in _DTYPES:
            dtype = _DTYPES.get(name)
        case _:
            raise ProtocolError("A frame's entry is not [dtype, shape, checksum] with a known dtype.")
    if len(shape) > MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ProtocolError(f"A frame's shape has at most {MAX_DIMS} sizes of at least 0.")
    if dtype is None and len(shape) != 1:
        raise ProtocolError(f"A frame of plain bytes has one size, found {len(shape)}.")
    # Zeros count as one here, so that no product of the other sizes can overflow.
    if math.prod(max(size, 1) for size in shape) > MAX_FRAME_BYTES:
        raise ProtocolError(f"A frame may have {MAX_FRAME_BYTES} bytes; its shape announces more.")
    return dtype, shape, expected
