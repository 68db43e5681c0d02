"""Those who come to a server: where each is answered, and who has left. No sockets."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ProtocolError
from shoal.ps.plain.messages import DeskAnswer


@dataclass(kw_only=True)
class Caller:
    """A client, and how far it got at a desk that keeps no record of its own."""

    peer: int
    """Its number on this server's wire."""
    address: str
    """Where it listens."""
    is_there: bool = True
    said_hello: bool = False
    last_sequence: int = 0
    last_answer: DeskAnswer | None = None
    """None after what only reads: values may be big, and asking twice does no harm."""


class Clientele:
    """At most so many; those who left make room for new ones."""

    def __init__(self, most: int, *, first_peer: int = 0) -> None:
        self._most = most
        self._callers: dict[bytes, Caller] = {}
        self._next_peer = first_peer

    def meet(self, client: bytes, address: str) -> Caller:
        """Who asks; `ProtocolError` where there is no room for one more."""
        if (caller := self._callers.get(client)) is None:
            self._make_room()
            caller = self._callers[client] = Caller(peer=self._next_peer, address=address)
            self._next_peer += 1
        caller.is_there = True
        return caller

    def known(self, client: bytes) -> Caller | None:
        """A client that was met, and not forgotten since."""
        return self._callers.get(client)

    def left(self, peer: int) -> None:
        """This client's connection has ended; it may come back as long as nobody needs its place."""
        for caller in self._callers.values():
            if caller.peer == peer:
                caller.is_there = False

    @property
    def present(self) -> int:
        """Clients whose connection has not ended."""
        return sum(caller.is_there for caller in tuple(self._callers.values()))

    def _make_room(self) -> None:
        if len(self._callers) < self._most:
            return
        absent = [client for client, caller in self._callers.items() if not caller.is_there]
        if not absent:
            raise ProtocolError(f"There are {self._most} clients already.")
        del self._callers[absent[0]]
