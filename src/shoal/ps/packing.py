"""Messages of the parameter server as the codec carries them, every field checked when they arrive."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from shoal.comm.codec import Message
from shoal.errors import ProtocolError
from shoal.ps.messages import KINDS, PsMessage


def pack(message: PsMessage) -> Message:
    """The message as the codec carries it."""
    values = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "frames"}
    return Message(message.kind, values, message.frames)


def unpack(message: Message) -> PsMessage:
    """The message that `pack` made, every field checked; `ProtocolError` for anything else."""
    cls = KINDS.get(message.kind)
    if cls is None:
        raise ProtocolError(f"There is no message {message.kind!r} in the parameter server's protocol.")
    types = _types_of(cls)
    required = {f.name for f in fields(cls) if f.default is MISSING}
    if not required <= message.fields.keys() <= types.keys():
        raise ProtocolError(f"A message {message.kind!r} has the fields {sorted(types)}, found others.")
    for name, value in message.fields.items():
        if not _fits(value, types[name]):
            raise ProtocolError(f"Field {name!r} of a message {message.kind!r} has the wrong type.")
    return cls(**message.fields, frames=tuple(message.frames))


_TYPES: dict[type[PsMessage], dict[str, Any]] = {}


def _types_of(cls: type[PsMessage]) -> dict[str, Any]:
    if cls not in _TYPES:
        _TYPES[cls] = {f.name: get_type_hints(cls)[f.name] for f in fields(cls) if f.name != "frames"}
    return _TYPES[cls]


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind
