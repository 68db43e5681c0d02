"""What servers of a store say to each other, as messages of the codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.comm.codec import Frame, Message, MessageForm
from shoal.errors import ProtocolError
from shoal.kv.requests import KvRequest
from shoal.ps.plain.messages import as_request, request_fields


@dataclass(frozen=True, kw_only=True)
class Ping:
    """A server lives."""

    server: int
    life: str
    """Another one where it has been started again."""


@dataclass(frozen=True, kw_only=True)
class ChangeMade:
    """A change that a shard's primary has made, for its backup."""

    shard: int
    generation: int
    index: int
    """Changes are made in this order, without gaps."""
    request: KvRequest


@dataclass(frozen=True, kw_only=True)
class ChangeTaken:
    """The backup has every change up to this one."""

    shard: int
    generation: int
    index: int


@dataclass(frozen=True, kw_only=True)
class CopyAsk:
    """A new backup asks for the shard's memory from here on; nothing changes there until it has all."""

    shard: int
    generation: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class CopyPart:
    """Some of the shard's memory. What lies before it, from what was asked for on, is zero."""

    shard: int
    generation: int
    asked: int
    offset: int
    behind: int
    """Where to go on; -1: this was all."""
    data: Frame


@dataclass(frozen=True, kw_only=True)
class CopyDone:
    """The new backup has all of it, up to this change."""

    shard: int
    generation: int
    index: int


ShardLetter = ChangeMade | ChangeTaken | CopyAsk | CopyPart | CopyDone
Letter = Ping | ShardLetter
_KINDS: dict[str, type[Letter]] = {
    f"kv {kind.__name__}": kind for kind in (Ping, ChangeMade, ChangeTaken, CopyAsk, CopyPart, CopyDone)
}
_FORMS = {name: MessageForm(kind, but=("request", "data")) for name, kind in _KINDS.items()}


def write_letter(letter: Letter) -> Message:
    """What one server says to another."""
    name = f"kv {type(letter).__name__}"
    fields: dict[str, Any] = _FORMS[name].plain(letter)
    frames: Sequence[Frame] = ()
    if isinstance(letter, ChangeMade):
        request = letter.request
        fields["request"], frames = [request.ask, request_fields(request)], request.bulk.frames
    elif isinstance(letter, CopyPart):
        frames = (letter.data,)
    return Message(name, fields, frames)


def read_letter(message: Message) -> Letter | None:
    """What a server has said; None for a message that is something else, `ProtocolError` for a broken one."""
    if (kind := _KINDS.get(message.kind)) is None:
        return None
    fields, more = dict(message.fields), dict[str, Any]()
    match fields.pop("request", None), message.frames:
        case [str(ask), dict(asked)], frames if kind is ChangeMade:
            more["request"] = as_request(KvRequest, ask, asked, frames)
        case None, [data] if kind is CopyPart:
            more["data"] = data
        case None, [] if kind not in (ChangeMade, CopyPart):
            pass
        case _:
            raise ProtocolError(f"A message {message.kind!r} comes without what it is to bring, or with more.")
    return kind(**_FORMS[message.kind].read(message.kind, fields), **more)
