"""Numbered requests, and what a desk answers, as messages of the codec.

A client numbers what it asks and repeats it until it is answered, so that each change is made once.
"""

from __future__ import annotations

import ipaddress
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor

from shoal.comm.codec import Frame, Message, MessageForm
from shoal.comm.security import host_of
from shoal.errors import ProtocolError
from shoal.ps.plain.tensors import PlainBulk, TensorSpec

CLIENT_ID_BYTES = 16
UNCOMPRESSED = "none"
_UNIX_SOCKET = re.compile(rb"ipc://(@[\w.-]{1,100}|/[^\0]{1,106})")
"""One without a file, or with one whose path the kernel takes."""
_MOST_REMEMBERED = 4096


@dataclass(frozen=True, kw_only=True)
class DeskRequest(ABC):
    """What a client asks, whatever it is. A repeated request is the same in every byte."""

    ask: str
    client: bytes = b""
    """Who asks: random, made by the client."""
    sequence: int = 0
    """Counts this client's requests."""
    compress: str = UNCOMPRESSED
    """How the bulk is compressed."""
    bulk: PlainBulk = field(default_factory=PlainBulk)

    @property
    @abstractmethod
    def reads(self) -> bool:
        """Whether it changes nothing."""

    def require_sense(self) -> None:
        """`ProtocolError` for what no client sends, though every field has its type."""
        if len(self.client) != CLIENT_ID_BYTES or self.sequence <= 0:
            raise ProtocolError("A request comes without a client's name or without a number.")


class Ask(StrEnum):
    """What a client may want of a plain server."""

    HELLO = "hello"
    """To be known, and to learn what parameters there are."""
    GET = "get"
    UPDATE = "update"
    STORE = "store"
    AVERAGE = "average"
    MERGE = "merge"


@dataclass(frozen=True, kw_only=True)
class Request(DeskRequest):
    """What a client asks of a plain server."""

    names: Sequence[str] = ()
    """The parameters it is about; in a GET, none means all."""
    share: float = 1.0
    """How much of what is sent an AVERAGE mixes in."""
    since: int = 0
    """The version from which a MERGE has come."""

    @property
    def reads(self) -> bool:
        return self.ask in (Ask.HELLO, Ask.GET)

    def require_sense(self) -> None:
        super().require_sense()
        if self.ask not in tuple(Ask):
            raise ProtocolError("A message's kind is nothing that a client may ask.")
        if len(set(self.names)) < len(self.names):
            raise ProtocolError("Of a request's names one is there twice.")
        if type(self.share) is not float or not 0 < self.share <= 1:
            raise ProtocolError("The share of a request is not above 0 and up to 1.")


class WishOutcome(StrEnum):
    """What came of a request."""

    DONE = "done"
    REFUSED = "refused"
    """It cannot be, and nothing changed; `reason` says why."""
    UNKNOWN_CLIENT = "unknown client"
    """The server has not met this client, so it cannot tell what it has done for it already."""
    WAITS = "waits"
    """It was heard, and has to wait for what others do."""
    ELSEWHERE = "elsewhere"
    """Another server has to be asked."""


@dataclass(frozen=True, kw_only=True)
class DeskAnswer:
    """What a server says to a request."""

    sequence: int
    """The request's."""
    outcome: WishOutcome = WishOutcome.DONE
    reason: str = ""
    version: int = 0
    """Changes of a plain server's parameters so far."""
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    """After a HELLO: all parameters."""
    notice: Mapping[str, int] = field(default_factory=dict)
    """After a HELLO: what the server wants all clients to know."""
    moved_to: int = -1
    """Where it is elsewhere: at which server; -1: it is not known at which."""
    memory: str = ""
    """After a hello to a store that they may use: where processes of this host find a shard's memory."""
    bulk: PlainBulk = field(default_factory=PlainBulk)
    """Values that were asked for."""

    @property
    def values(self) -> Tensor | None:
        """The one tensor that came, as it is."""
        (values,) = self.bulk.frames or (None,)
        return values if isinstance(values, Tensor) else None


Asked = TypeVar("Asked", bound=DeskRequest)
_ANSWER = MessageForm(DeskAnswer, but=("outcome", "specs", "bulk"))


_FORMS: dict[type[DeskRequest], MessageForm] = {}


def _form(kind: type[DeskRequest]) -> MessageForm:
    if kind not in _FORMS:
        _FORMS[kind] = MessageForm(kind, but=("ask", "bulk"))
    return _FORMS[kind]


def write_request(request: DeskRequest, reply_to: str) -> Message:
    """The request as a message, with the address at which its answer is awaited."""
    return Message(request.ask, {**request_fields(request), "reply_to": reply_to}, request.bulk.frames)


def read_request(kind: type[Asked], message: Message) -> tuple[Asked, str]:
    """The request in a message, and where its answer is awaited; `ProtocolError` for anything else."""
    fields = dict(message.fields)
    reply_to = fields.pop("reply_to", None)
    if not isinstance(reply_to, str) or not _is_reachable(reply_to):
        raise ProtocolError("A request wants its answer at what is no address of a TCP or Unix socket.")
    return as_request(kind, message.kind, fields, message.frames), reply_to


def request_fields(request: DeskRequest) -> dict[str, Any]:
    """All of a request that is neither its kind nor bulk, as plain data."""
    return {**_form(type(request)).plain(request), "packing": list(request.bulk.packing)}


def as_request(kind: type[Asked], ask: str, fields: dict[str, Any], frames: Sequence[Frame]) -> Asked:
    """The request with the fields that `request_fields` gave; `ProtocolError` for anything else."""
    bulk = PlainBulk(packing=_taken(fields, "packing", list), frames=frames)
    request = kind(ask=ask, bulk=bulk, **_form(kind).read(ask, fields))
    request.require_sense()
    return request


def write_answer(answer: DeskAnswer) -> Message:
    """The answer as a message."""
    specs = {name: spec.to_plain() for name, spec in answer.specs.items()}
    fields = {**_ANSWER.plain(answer), "specs": specs, "packing": list(answer.bulk.packing)}
    return Message(answer.outcome.value, fields, answer.bulk.frames)


def read_answer(message: Message) -> DeskAnswer:
    """The answer in a message; `ProtocolError` for anything else."""
    if message.kind not in tuple(WishOutcome):
        raise ProtocolError("A message's kind is nothing that a server may answer.")
    fields = dict(message.fields)
    bulk = PlainBulk(packing=_taken(fields, "packing", list), frames=message.frames)
    specs = {str(name): TensorSpec.from_plain(plain) for name, plain in _taken(fields, "specs", dict).items()}
    found = _ANSWER.read(message.kind, fields)
    return DeskAnswer(outcome=WishOutcome(message.kind), specs=specs, bulk=bulk, **found)


def _taken(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(found := fields.pop(name, None), kind):
        raise ProtocolError(f"The {name} of a message is no {kind.__name__}.")
    return found


@lru_cache(_MOST_REMEMBERED)
def _is_reachable(address: str) -> bool:
    """Only what a client's own socket says: a name could keep the server waiting, other spellings raise."""
    return bool(_UNIX_SOCKET.fullmatch(address.encode())) or _spelled_out(address) == address


def _spelled_out(address: str) -> str | None:
    """The one way in which ZeroMQ writes this TCP address."""
    host, port = host_of(address.removeprefix("tcp://")), address.rpartition(":")[2]
    try:
        ip, number = ipaddress.ip_address(host), int(port)
    except ValueError:
        return None
    if not 0 < number < 1 << 16:
        return None
    return f"tcp://[{ip}]:{number}" if ip.version == 6 else f"tcp://{ip}:{number}"
