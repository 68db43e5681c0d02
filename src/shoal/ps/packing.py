"""Messages of the parameter server as the codec carries them, every field checked when they arrive."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

from shoal.comm.codec import Message
from shoal.errors import ProtocolError
from shoal.ps import between_servers  # noqa: F401  its messages are carried, too
from shoal.ps.messages import KINDS, PsMessage


def pack(message: PsMessage) -> Message:
    """The message as the codec carries it."""
    values = {name: getattr(message, name) for name in _FORMS[message.kind].types}
    return Message(message.kind, values, message.frames)


def unpack(message: Message) -> PsMessage:
    """The message that `pack` made, every field checked; `ProtocolError` for anything else."""
    cls = KINDS.get(message.kind)
    if cls is None:
        raise ProtocolError(f"There is no message {message.kind!r} in the parameter server's protocol.")
    form = _FORMS[message.kind]
    if not form.required <= message.fields.keys() <= form.types.keys():
        raise ProtocolError(f"A message {message.kind!r} has the fields {sorted(form.types)}, found others.")
    for name, value in message.fields.items():
        kind = form.types[name]
        if type(value) is not kind and not _fits(value, kind):
            raise ProtocolError(f"Field {name!r} of a message {message.kind!r} has the wrong type.")
    return cls(**message.fields, frames=tuple(message.frames))


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What the fields of one kind of message have to be, but for the frames."""

    types: dict[str, Any]
    required: frozenset[str]


def _form_of(cls: type[PsMessage]) -> _Form:
    hints, small = get_type_hints(cls), [f for f in fields(cls) if f.name != "frames"]
    return _Form(
        types={f.name: hints[f.name] for f in small},
        required=frozenset(f.name for f in small if f.default is MISSING and f.default_factory is MISSING),
    )


_FORMS = {kind: _form_of(cls) for kind, cls in KINDS.items()}


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
