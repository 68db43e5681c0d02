"""The desk of a plain server: takes requests and gives answers, each done once. No sockets.

The wire may lose, repeat and delay requests and answers. The desk keeps, per client, the number of the last one
and its answer, and gives that again.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.comm.compression import make_compression
from shoal.errors import ShoalError
from shoal.ps.plain.clientele import Caller
from shoal.ps.plain.messages import UNCOMPRESSED, Ask, DeskAnswer, Request, WishOutcome
from shoal.ps.plain.table import ParameterTable
from shoal.ps.plain.tensors import pack, require_known, unpack

_MAX_REASON = 2000


class Desk:
    """Over a table of parameters and their optimizer."""

    def __init__(self, table: ParameterTable, notice: Mapping[str, int] | None = None) -> None:
        """`notice`: what every client is told when it comes."""
        self._table = table
        self._notice = dict(notice or {})

    def take(self, request: Request, caller: Caller) -> DeskAnswer | None:
        """The answer; None where there is none."""
        if request.sequence < caller.last_sequence:
            return None  # A late repeat: the client has its answer, or waits for it no more.
        answer = caller.last_answer if request.sequence == caller.last_sequence else None
        if answer is None:
            answer = self._answer(request, caller)
            caller.last_sequence = request.sequence
            caller.last_answer = None if request.ask == Ask.GET else answer
        return answer

    def _answer(self, request: Request, caller: Caller) -> DeskAnswer:
        caller.said_hello |= request.ask == Ask.HELLO
        if not caller.said_hello:
            return DeskAnswer(outcome=WishOutcome.UNKNOWN_CLIENT, sequence=request.sequence)
        try:
            return self._do(request)
        except Exception as error:  # What one client sends must not end the service of all.
            return DeskAnswer(
                outcome=WishOutcome.REFUSED,
                sequence=request.sequence,
                version=self._table.version,
                reason=_reason(error)[:_MAX_REASON],
            )

    def _do(self, request: Request) -> DeskAnswer:
        sequence, table = request.sequence, self._table
        match request.ask:
            case Ask.HELLO:
                return DeskAnswer(sequence=sequence, version=table.version, specs=table.specs, notice=self._notice)
            case Ask.GET:
                version, values = table.copies(request.names)
                return DeskAnswer(sequence=sequence, version=version, bulk=pack(values))
            case Ask.UPDATE:
                version = table.update(self._sent(request))
            case Ask.STORE:
                version = table.store(self._sent(request))
            case Ask.AVERAGE:
                version = table.average(self._sent(request), request.share)
            case _:
                version = table.merge(self._sent(request), request.since)
        return DeskAnswer(sequence=sequence, version=version)

    def _sent(self, request: Request) -> dict[str, Tensor]:
        """The tensors in a request; memory is taken for what the table has, not for what the client claims."""
        require_known(request.names, self._table.specs)
        compression = None if request.compress == UNCOMPRESSED else make_compression(request.compress)
        return unpack(request.bulk, request.names, self._table.specs, compression)


def _reason(error: Exception) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    return f"The server could not do this: {type(error).__name__}: {error}"
