"""What a client asks and what a server answers, as messages of the codec."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.comm.codec import Message
from shoal.comm.security import host_of
from shoal.errors import ProtocolError
from shoal.ps.plain.tensors import PlainBulk, TensorSpec

CLIENT_ID_BYTES = 16
UNCOMPRESSED = "none"
_UNIX_SOCKET = re.compile(rb"ipc://(@[\w.-]{1,100}|/[^\0]{1,106})")
"""One without a file, or with one whose path the kernel takes."""


class Ask(StrEnum):
    """What a client may want."""

    HELLO = "hello"
    """To be known, and to learn what parameters there are."""
    GET = "get"
    UPDATE = "update"
    STORE = "store"
    AVERAGE = "average"
    MERGE = "merge"


class WishOutcome(StrEnum):
    """What came of it."""

    DONE = "done"
    REFUSED = "refused"
    """It cannot be, and nothing changed; `reason` says why."""
    UNKNOWN_CLIENT = "unknown client"
    """The server has not met this client, so it cannot tell what it has done for it already."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks. A repeated request is the same in every byte."""

    ask: Ask
    client: bytes
    """Who asks: random, made by the client."""
    sequence: int
    """Counts this client's requests."""
    reply_to: str
    """Where the client listens for the answer."""
    names: tuple[str, ...] = ()
    """The parameters it is about; in a GET, none means all."""
    share: float = 1.0
    """How much of what is sent an AVERAGE mixes in."""
    since: int = 0
    """The version from which a MERGE has come."""
    compress: str = UNCOMPRESSED
    """How the bulk is compressed."""
    bulk: PlainBulk = field(default_factory=PlainBulk)


@dataclass(frozen=True, kw_only=True)
class PlainAnswer:
    """What the server says to a request."""

    outcome: WishOutcome
    sequence: int
    """The request's."""
    version: int = 0
    """Changes of the parameters so far."""
    reason: str = ""
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    """After a HELLO: all parameters."""
    notice: Mapping[str, int] = field(default_factory=dict)
    """After a HELLO: what the server wants all clients to know."""
    bulk: PlainBulk = field(default_factory=PlainBulk)
    """After a GET: the values."""


def write_request(request: Request) -> Message:
    """The request as a message."""
    fields = {
        "client": request.client,
        "sequence": request.sequence,
        "reply_to": request.reply_to,
        "names": list(request.names),
        "share": request.share,
        "since": request.since,
        "compress": request.compress,
        "packing": list(request.bulk.packing),
    }
    return Message(request.ask.value, fields, request.bulk.frames)


def read_request(message: Message) -> Request:
    """The request in a message; `ProtocolError` for anything else."""
    if message.kind not in tuple(Ask):
        raise ProtocolError("A message's kind is nothing that a client may ask.")
    match message.fields:
        case {
            "client": bytes(client),
            "sequence": int(sequence),
            "reply_to": str(reply_to),
            "names": list(names),
            "share": float(share),
            "since": int(since),
            "compress": str(compress),
            "packing": list(packing),
        } if len(client) == CLIENT_ID_BYTES and sequence > 0 and 0 < share <= 1:
            _require_names(names)
            _require_reachable(reply_to)
        case _:
            raise ProtocolError(f"The fields of message {message.kind!r} are not a request's.")
    return Request(
        ask=Ask(message.kind),
        client=client,
        sequence=sequence,
        reply_to=reply_to,
        names=tuple(names),
        share=share,
        since=since,
        compress=compress,
        bulk=PlainBulk(packing=packing, frames=message.frames),
    )


def write_answer(answer: PlainAnswer) -> Message:
    """The answer as a message."""
    fields = {
        "sequence": answer.sequence,
        "version": answer.version,
        "reason": answer.reason,
        "specs": {name: spec.to_plain() for name, spec in answer.specs.items()},
        "notice": dict(answer.notice),
        "packing": list(answer.bulk.packing),
    }
    return Message(answer.outcome.value, fields, answer.bulk.frames)


def read_answer(message: Message) -> PlainAnswer:
    """The answer in a message; `ProtocolError` for anything else."""
    if message.kind not in tuple(WishOutcome):
        raise ProtocolError("A message's kind is nothing that a server may answer.")
    match message.fields:
        case {
            "sequence": int(sequence),
            "version": int(version),
            "reason": str(reason),
            "specs": dict(specs),
            "notice": dict(notice),
            "packing": list(packing),
        } if all(isinstance(number, int) for number in notice.values()):
            return PlainAnswer(
                outcome=WishOutcome(message.kind),
                sequence=sequence,
                version=version,
                reason=reason,
                specs={str(name): TensorSpec.from_plain(plain) for name, plain in specs.items()},
                notice={str(name): number for name, number in notice.items()},
                bulk=PlainBulk(packing=packing, frames=message.frames),
            )
        case _:
            raise ProtocolError(f"The fields of message {message.kind!r} are not an answer's.")


def _require_names(names: list[object]) -> None:
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ProtocolError("A request's names are not texts, or one is there twice.")


def _require_reachable(address: str) -> None:
    """Only what a client's own socket says: a name could keep the server waiting, other spellings raise."""
    if not _UNIX_SOCKET.fullmatch(address.encode()) and _spelled_out(address) != address:
        raise ProtocolError("A request wants its answer at what is no address of a TCP or Unix socket.")


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
