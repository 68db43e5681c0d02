"""Requests, answers, and what servers say to each other, as messages of the codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.comm.codec import MAX_FRAME_BYTES, Frame, Message
from shoal.errors import ProtocolError
from shoal.kv.requests import KvAnswer, KvPacked, KvRequest

CLIENT_ID_BYTES = 16
_ANSWER, _REQUEST = "kv answer", "kv request"


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
_LETTERS: dict[str, type[Letter]] = {
    f"kv {kind.__name__}": kind for kind in (Ping, ChangeMade, ChangeTaken, CopyAsk, CopyPart, CopyDone)
}


def write_letter(letter: Letter) -> Message:
    """What one server says to another."""
    fields: dict[str, Any] = dict(vars(letter))
    frames: Sequence[Frame] = ()
    if isinstance(letter, ChangeMade):
        fields["request"], frames = _request_fields(letter.request)
    elif isinstance(letter, CopyPart):
        frames = (fields.pop("data"),)
    return Message(f"kv {type(letter).__name__}", fields, frames)


def read_letter(message: Message) -> Letter | None:
    """What a server has said; None for a message that is something else, `ProtocolError` for a broken one."""
    if (kind := _LETTERS.get(message.kind)) is None:
        return None
    fields = dict(message.fields)
    try:
        if kind is ChangeMade:
            fields["request"] = _read_request_fields(fields["request"], message.frames)
        elif kind is CopyPart:
            (fields["data"],) = message.frames
        letter = kind(**fields)
    except (TypeError, KeyError, ValueError):
        raise ProtocolError(
            f"The fields of message {message.kind!r} are not those of a key-value server."
        ) from None
    for name, value in vars(letter).items():
        if name not in ("request", "data", "life") and type(value) is not int:
            raise ProtocolError(f"{name} of message {message.kind!r} is no number.")
    return letter


def write_kv_request(request: KvRequest, reply_to: str) -> Message:
    """The request, with the address at which its answer is awaited."""
    fields, frames = _request_fields(request)
    return Message(_REQUEST, {**fields, "reply_to": reply_to}, frames)


def read_kv_request(message: Message) -> tuple[KvRequest, str]:
    """The request in a message, and where its answer is awaited; `ProtocolError` for anything else."""
    reply_to = message.fields.get("reply_to")
    if message.kind != _REQUEST or not isinstance(reply_to, str):
        raise ProtocolError(f"A message of kind {message.kind!r} is no key-value request.")
    return _read_request_fields(message.fields, message.frames), reply_to


def _request_fields(request: KvRequest) -> tuple[dict[str, Any], Sequence[Frame]]:
    fields = {
        "ask": request.ask,
        "shard": request.shard,
        "client": request.client,
        "sequence": request.sequence,
        "worker": request.worker,
        "key": request.key,
        "span": [request.start, request.count],
        "is_last": request.is_last,
        "look": list(request.look),
        "rule": None if request.rule is None else list(request.rule),
        "has_rows": request.rows is not None,
        "packed": None,
    }
    frames: list[Frame] = [one for one in (request.rows, request.values) if one is not None]
    if (packed := request.packed) is not None:
        fields["packed"] = [packed.how, packed.count, packed.fields]
        frames += packed.frames
    return fields, frames


def _read_request_fields(fields: dict[str, Any], given: Sequence[Frame]) -> KvRequest:
    frames = list(given)
    match fields:
        case {
            "ask": str(ask),
            "shard": int(shard),
            "client": bytes(client),
            "sequence": int(sequence),
            "worker": int(worker),
            "key": str(key),
            "span": [int(start), int(count)],
            "is_last": bool(is_last),
            "look": list(look),
            "rule": (None | [str(), dict()]) as rule,
            "has_rows": bool(has_rows),
            "packed": (None | [str(), int(), dict()]) as packed,
        } if len(client) == CLIENT_ID_BYTES:
            rows = frames.pop(0) if has_rows and frames else None
            values = frames[0] if frames and packed is None else None
        case _:
            raise ProtocolError("The fields of a message are not those of a key-value request.")
    return KvRequest(
        ask=ask,
        shard=shard,
        client=client,
        sequence=sequence,
        worker=worker,
        key=key,
        start=start,
        count=count,
        is_last=is_last,
        look=tuple(look),
        rule=None if rule is None else (rule[0], rule[1]),
        rows=rows if isinstance(rows, Tensor) else None,
        values=values if isinstance(values, Tensor) else None,
        packed=None if packed is None else _read_packed(packed, frames),
    )


def _read_packed(plain: list[Any], frames: Sequence[Frame]) -> KvPacked:
    how, count, fields = plain
    if not 0 <= count <= MAX_FRAME_BYTES:
        raise ProtocolError(f"A request announces {count} rows, which is more than one carries.")
    return KvPacked(how=how, count=count, fields=fields, frames=tuple(frames))


def write_kv_answer(answer: KvAnswer) -> Message:
    """The answer."""
    fields = {name: value for name, value in vars(answer).items() if name != "values"}
    return Message(_ANSWER, fields, [] if answer.values is None else [answer.values])


def read_kv_answer(message: Message) -> KvAnswer:
    """The answer in a message; `ProtocolError` for anything else."""
    match message.fields:
        case {
            "sequence": int(sequence),
            "reason": str(reason),
            "waits": bool(waits),
            "moved_to": (None | int()) as moved_to,
            "memory": str(memory),
        } if message.kind == _ANSWER:
            values = message.frames[0] if message.frames else None
            return KvAnswer(
                sequence=sequence,
                reason=reason,
                values=values if isinstance(values, Tensor) else None,
                waits=waits,
                moved_to=moved_to,
                memory=memory,
            )
    raise ProtocolError("A message is no answer of a key-value server.")
