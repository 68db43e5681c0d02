"""From a client to a server: asks, waits for the answer, and asks again where none comes."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.comm.codec import Buffer, decode, encode
from shoal.comm.security import RunKey, host_of
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, LaunchError, PeerLost, ProtocolError, SpecError
from shoal.ps.plain.messages import (
    CLIENT_ID_BYTES,
    Asked,
    DeskAnswer,
    DeskRequest,
    WishOutcome,
    read_answer,
    write_request,
)

PATIENCE_S = 1.0
_LOOK_EVERY_S = 0.1
# A connection that ended is tried again after this long: the server may be about to start.
_RECONNECT_AFTER_S = 0.1
_MOST_PATIENCE = 8
# On a slow network a big request is on its way for long, and must not be followed by its repeat.
_SLOW_BYTES_PER_S = 50e6


class RequestLine:
    """To a server that may die and come back, at this or another of some addresses. One line serves one thread.

    Requests are numbered, and one is the same however often it has to be sent; servers make it once.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: RunKey,
        *,
        first: int = 0,
        timeout_s: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`timeout_s`: how long without a sign until it is given up; `patience_s`: until it is asked again."""
        self._addresses, self._timeout_s, self._patience_s = list(addresses), timeout_s, patience_s
        for address in addresses:
            require_address(address)
        self._server = first
        self._client, self._sequence = secrets.token_bytes(CLIENT_ID_BYTES), 0
        self.wire = ZmqWire(reply_address(self._addresses[0]), key=key, linger_s=0.0)

    @property
    def where(self) -> str:
        """Whom it leads to, for sentences."""
        one = len(self._addresses) == 1
        return f"The server at {self._addresses[0]}" if one else f"The servers at {', '.join(self._addresses)}"

    def numbered(self, request: Asked, **more: Any) -> Asked:
        """This client's next request."""
        self._sequence += 1
        return replace(request, client=self._client, sequence=self._sequence, **more)

    def ask(self, request: DeskRequest, *, awaited_bytes: int = 0) -> DeskAnswer:
        """Number it, ask and wait; raises where it was refused."""
        return self.good(self.exchange(self.numbered(request), awaited_bytes=awaited_bytes))

    def good(self, answer: DeskAnswer) -> DeskAnswer:
        """What was done; anything else is raised."""
        if answer.outcome is WishOutcome.UNKNOWN_CLIENT:
            raise PeerLost(
                f"{self.where} does not know this client: it was started anew, or has forgotten who left; make a "
                "new client.",
                peer=self._addresses[0],
            )
        return done(answer)

    def exchange(self, request: DeskRequest, *, awaited_bytes: int = 0) -> DeskAnswer:
        """Ask whoever it concerns until the answer comes, of which so many bytes are expected."""
        packet = encode(write_request(request, self.wire.address))
        num_bytes = awaited_bytes + sum(memoryview(part).nbytes for part in packet)
        patience_s = self._patience_s + num_bytes / _SLOW_BYTES_PER_S
        most_patience_s, is_repeat, is_heard = _MOST_PATIENCE * patience_s, False, False
        now = ask_at = time.monotonic()
        deadline = now + self._timeout_s
        while now < deadline:
            if now >= ask_at:
                if is_repeat:
                    self._server = (self._server + 1) % len(self._addresses)
                self._transmit(packet)
                ask_at, patience_s, is_repeat = now + patience_s, min(2 * patience_s, most_patience_s), True
            elif self._server in self.wire.gone():
                ask_at = min(ask_at, now + _RECONNECT_AFTER_S)
            answer = self._next(request.sequence, max(0.0, min(ask_at - now, deadline - now, _LOOK_EVERY_S)))
            now = time.monotonic()
            if answer is None:
                continue
            is_heard = answer.outcome is WishOutcome.ELSEWHERE
            if is_heard:
                if answer.moved_to >= 0:
                    self._server, is_repeat = answer.moved_to % len(self._addresses), False
                ask_at = now + (0.0 if answer.moved_to >= 0 else _RECONNECT_AFTER_S)
            elif answer.outcome is WishOutcome.WAITS:
                deadline, is_repeat = now + self._timeout_s, False
                ask_at = now + _RECONNECT_AFTER_S if request.ask == "hello" else ask_at
            else:
                return answer
        raise self._silence(request, is_heard=is_heard)

    def close(self) -> None:
        """Leave. The server forgets this client when it needs the place."""
        self.wire.close()

    def _silence(self, request: DeskRequest, *, is_heard: bool) -> CommTimeout:
        why = "nothing listens there, the key is not its key, or the address is not written as it shows it."
        if is_heard:
            why = "what answers there speaks for nothing that this is about; look at what it says."
        doubt = "" if request.reads else f" Whether it made this {request.ask} is not known."
        return CommTimeout(
            f"{self.where} did not answer within {self._timeout_s:g} s: {why}{doubt}",
            peer=", ".join(self._addresses),
        )

    def _next(self, sequence: int, wait_s: float) -> DeskAnswer | None:
        arrived = self.wire.poll(wait_s)
        try:
            answer = None if arrived is None else read_answer(decode(arrived))
        except ProtocolError:
            return None  # Damaged on the way: it will be asked for again.
        return answer if answer is not None and answer.sequence == sequence else None

    def _transmit(self, packet: list[Buffer]) -> None:
        if self._server not in self.wire.peers or self._server in self.wire.gone():
            self.wire.connect(self._server, self._addresses[self._server])
        self.wire.transmit(self._server, list(packet))


def done(answer: DeskAnswer) -> DeskAnswer:
    """An answer that was not refused."""
    if answer.outcome is WishOutcome.REFUSED:
        raise SpecError(answer.reason)
    return answer


def require_address(address: str, advice: str = "copy what the server shows as its address") -> None:
    """`SpecError` for what no server listens at."""
    transport, _, where = address.partition("://")
    port = where.rpartition(":")[2]
    is_tcp = transport == "tcp" and host_of(where) and port.isdecimal() and 0 < int(port) < 1 << 16
    if not (is_tcp or address.startswith(("ipc://@", "ipc:///"))):
        raise SpecError(
            f"A server's address is tcp://ADDRESS:PORT, ipc:///FOLDER/NAME or ipc://@NAME, found {address!r}; "
            f"{advice}."
        )


def reply_address(server: str) -> str:
    """A place to listen on the network through which the server is reached."""
    require_address(server)
    if server.startswith("ipc://@"):
        return f"ipc://@shoal-{os.getpid()}-{secrets.token_hex(8)}"
    if server.startswith("ipc:///"):
        return f"{server.rpartition('/')[0]}/*"
    where = server.removeprefix("tcp://")
    try:
        found = socket.getaddrinfo(host_of(where), int(where.rpartition(":")[2]), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        # Connecting a datagram socket sends nothing; it only asks the system for the way.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            here = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(
            f"There is no way to the server's address {server} ({error.strerror}); check it, and the network."
        ) from None
    return f"tcp://[{here}]:*" if ":" in here else f"tcp://{here}:*"
