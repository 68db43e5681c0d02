"""The desk of a plain server: takes requests and gives answers, each done once. No sockets.

The wire may lose, repeat and delay requests and answers. A client numbers its requests and repeats one until it
is answered; the desk keeps, per client, the last number and its answer, and gives that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.codec import Message
from shoal.comm.compression import make_compression
from shoal.errors import ProtocolError, ShoalError
from shoal.ps.plain.messages import (
    UNCOMPRESSED,
    Ask,
    PlainAnswer,
    Request,
    WishOutcome,
    read_request,
    write_answer,
)
from shoal.ps.plain.table import ParameterTable
from shoal.ps.plain.tensors import PlainBulk, pack, require_known, unpack

_MAX_REASON = 2000


@dataclass(kw_only=True)
class Caller:
    """A client, and how far it got."""

    peer: int
    """Its number on this server's wire."""
    address: str
    """Where it listens."""
    is_there: bool = True
    said_hello: bool = False
    last_sequence: int = 0
    last_answer: PlainAnswer | None = None
    """None after a GET: values may be big, and asking twice does no harm."""


class Desk:
    """Answers the requests of at most `max_clients` clients; those who left make room for new ones."""

    def __init__(
        self, table: ParameterTable, *, max_clients: int, notice: Mapping[str, int] | None = None
    ) -> None:
        """`notice`: what every client is told when it comes."""
        self._table = table
        self._notice = dict(notice or {})
        self._max_clients = max_clients
        self._callers: dict[bytes, Caller] = {}
        self._num_met = 0

    def take(self, message: Message) -> tuple[Caller, Message] | None:
        """Who asked, and the answer; None where there is none, and `ProtocolError` for what is no request."""
        request = read_request(message)
        caller = self._callers.get(request.client) or self._meet(request)
        caller.is_there = True
        if request.sequence < caller.last_sequence:
            return None  # A late repeat: the client has its answer, or waits for it no more.
        answer = caller.last_answer if request.sequence == caller.last_sequence else None
        if answer is None:
            answer = self._answer(request, caller)
            caller.last_sequence = request.sequence
            caller.last_answer = None if request.ask is Ask.GET else answer
        return caller, write_answer(answer)

    def left(self, peer: int) -> None:
        """This client's connection has ended; it may come back as long as nobody needs its place."""
        for caller in self._callers.values():
            if caller.peer == peer:
                caller.is_there = False

    @property
    def present(self) -> int:
        """Clients whose connection has not ended."""
        return sum(caller.is_there for caller in tuple(self._callers.values()))

    def _meet(self, request: Request) -> Caller:
        if len(self._callers) >= self._max_clients:
            absent = [client for client, caller in self._callers.items() if not caller.is_there]
            if not absent:
                raise ProtocolError(f"There are {self._max_clients} clients already.")
            del self._callers[absent[0]]
        caller = self._callers[request.client] = Caller(peer=self._num_met, address=request.reply_to)
        self._num_met += 1
        return caller

    def _answer(self, request: Request, caller: Caller) -> PlainAnswer:
        caller.said_hello |= request.ask is Ask.HELLO
        if not caller.said_hello:
            return PlainAnswer(outcome=WishOutcome.UNKNOWN_CLIENT, sequence=request.sequence)
        try:
            return self._do(request)
        except Exception as error:  # What one client sends must not end the service of all.
            return PlainAnswer(
                outcome=WishOutcome.REFUSED,
                sequence=request.sequence,
                version=self._table.version,
                reason=_reason(error)[:_MAX_REASON],
            )

    def _do(self, request: Request) -> PlainAnswer:
        version, specs, notice, bulk = self._table.version, {}, {}, PlainBulk()
        match request.ask:
            case Ask.HELLO:
                specs, notice = self._table.specs, self._notice
            case Ask.GET:
                version, values = self._table.copies(request.names)
                bulk = pack(values)
            case Ask.UPDATE:
                version = self._table.update(self._sent(request))
            case Ask.STORE:
                version = self._table.store(self._sent(request))
            case Ask.AVERAGE:
                version = self._table.average(self._sent(request), request.share)
            case Ask.MERGE:
                version = self._table.merge(self._sent(request), request.since)
        return PlainAnswer(
            outcome=WishOutcome.DONE,
            sequence=request.sequence,
            version=version,
            specs=specs,
            notice=notice,
            bulk=bulk,
        )

    def _sent(self, request: Request) -> dict[str, Tensor]:
        """The tensors in a request; memory is taken for what the table has, not for what the client claims."""
        require_known(request.names, self._table.specs)
        compression = None if request.compress == UNCOMPRESSED else make_compression(request.compress)
        return unpack(request.bulk, request.names, self._table.specs, compression)


def _reason(error: Exception) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    return f"The server could not do this: {type(error).__name__}: {error}"
