"""The client of a plain parameter server: asks, waits for the answer, and asks again where none comes."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from shoal.comm.codec import Buffer, decode, encode
from shoal.comm.compression import make_compression
from shoal.comm.security import RunKey, host_of
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, LaunchError, PeerLost, ProtocolError, SpecError
from shoal.ps.plain.messages import (
    CLIENT_ID_BYTES,
    UNCOMPRESSED,
    Ask,
    PlainAnswer,
    Request,
    WishOutcome,
    read_answer,
    write_request,
)
from shoal.ps.plain.tensors import Specs, pack, require_fit, require_known, unpack

_SERVER = 0
_LOOK_EVERY_S = 0.1
# A connection that ended is tried again after this long: the server may be about to start.
_RECONNECT_AFTER_S = 0.1
_MOST_PATIENCE = 8
# On a slow network a big request is on its way for long, and must not be followed by its repeat.
_SLOW_BYTES_PER_S = 50e6


class Client:
    """Reads and changes the parameters of a `shoal.ps.Server`. One client serves one thread.

    Each change is made once, however often the network makes the client ask. The first thing a client does is
    to meet the server, so one that is made has a server that answers.

    Args:
        address: The server's `address`, letter for letter.
        key: The server's `key`, or the file it was saved in.
        timeout_s: How long to wait for an answer before `CommTimeout`.
        patience_s: How long to wait before asking again.
        compress: How gradients travel: `bf16`, `int8`, `topk:0.01` and so on; what is rounded off one update is
            part of the next.
    """

    def __init__(
        self,
        address: str,
        *,
        key: RunKey | str | Path,
        timeout_s: float = 30.0,
        patience_s: float = 1.0,
        compress: str = UNCOMPRESSED,
    ) -> None:
        self.version = 0
        """The parameters' version as of the last answer."""
        self._address = address
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._compression = None if compress == UNCOMPRESSED else make_compression(compress)
        self._identity = secrets.token_bytes(CLIENT_ID_BYTES)
        self._sequence = 0
        self._specs: Specs = {}
        self.notice: Mapping[str, int] = {}
        """What the server tells every client when it comes."""
        self._closed = False
        self._busy = threading.Lock()
        self._wire = ZmqWire(
            reply_address(address), key=key if isinstance(key, RunKey) else RunKey.load(key), linger_s=0.0
        )
        try:
            self._wire.connect(_SERVER, address)
            welcome = self._ask(Ask.HELLO)
            self._specs, self.notice = welcome.specs, welcome.notice
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters on the server."""
        return tuple(self._specs)

    @property
    def specs(self) -> Specs:
        """By name, what they are like."""
        return self._specs

    def get(self, *names: str) -> dict[str, Tensor]:
        """These parameters, or all, as they were at one moment. They are the caller's to change."""
        require_known(names, self._specs)
        names = tuple(dict.fromkeys(names))
        return unpack(self._ask(Ask.GET, names=names).bulk, names or self.names, self._specs)

    def update(self, gradients: Mapping[str, Tensor]) -> int:
        """A step of the server's optimizer with these gradients, and none for others; the new version."""
        return self._send(Ask.UPDATE, gradients)

    def store(self, values: Mapping[str, Tensor]) -> int:
        """Set these parameters; the new version."""
        return self._send(Ask.STORE, values)

    def average(self, values: Mapping[str, Tensor], share: float = 0.5) -> int:
        """Move these parameters by `share` of the way to the values, as after local training; the new version."""
        if not 0 < share <= 1:
            raise SpecError(f"share is how much of the values to mix in, above 0 and up to 1, found {share}.")
        return self._send(Ask.AVERAGE, values, share=float(share))

    def merge(self, differences: Mapping[str, Tensor], since: int) -> int:
        """Bring how far this client has come, by all parameters, since it read this version; the one that the
        server has now. It moves once it has as many as its `merging` says."""
        return self._send(Ask.MERGE, differences, since=since)

    def close(self) -> None:
        """Leave. The server forgets this client when it needs the place."""
        self._closed = True
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, ask: Ask, values: Mapping[str, Tensor], *, share: float = 1.0, since: int = 0) -> int:
        require_fit(values, self._specs)
        return self._ask(ask, names=tuple(values), values=values, share=share, since=since).version

    def _ask(
        self,
        ask: Ask,
        *,
        names: tuple[str, ...] = (),
        values: Mapping[str, Tensor] | None = None,
        share: float = 1.0,
        since: int = 0,
    ) -> PlainAnswer:
        """Ask and wait. A good answer is returned, any other is raised."""
        if self._closed:
            raise SpecError("This client is closed; make a new one.")
        if not self._busy.acquire(blocking=False):
            raise SpecError("A client serves one thread, but another one uses this; make one for each.")
        try:
            self._sequence += 1
            compression = self._compression if ask is Ask.UPDATE else None
            request = Request(
                ask=ask,
                client=self._identity,
                sequence=self._sequence,
                reply_to=self._wire.address,
                names=names,
                share=share,
                since=since,
                compress=compression.text if compression else UNCOMPRESSED,
                bulk=pack(values or {}, compression),
            )
            answer = self._exchange(encode(write_request(request)), self._patience(names))
        finally:
            self._busy.release()
        return self._good(answer, ask)

    def _patience(self, names: tuple[str, ...]) -> float:
        """How long to wait at first: requests and answers about big parameters take their time."""
        num_bytes = sum(self._specs[name].num_bytes for name in names or self._specs)
        return self._patience_s + num_bytes / _SLOW_BYTES_PER_S

    def _exchange(self, packet: list[Buffer], patience_s: float) -> PlainAnswer | None:
        """Send until the answer comes; None when the time is over."""
        now = ask_at = time.monotonic()
        deadline, most_patience_s = now + self._timeout_s, _MOST_PATIENCE * patience_s
        while now < deadline:
            if now >= ask_at:
                self._transmit(packet)
                ask_at = now + patience_s
                patience_s = min(2 * patience_s, most_patience_s)
            elif _SERVER in self._wire.gone():
                ask_at = min(ask_at, now + _RECONNECT_AFTER_S)
            arrived = self._wire.poll(max(0.0, min(ask_at - now, deadline - now, _LOOK_EVERY_S)))
            if arrived is not None and (answer := self._read(arrived)) is not None:
                return answer
            now = time.monotonic()
        return None

    def _transmit(self, packet: list[Buffer]) -> None:
        if _SERVER in self._wire.gone():
            self._wire.connect(_SERVER, self._address)
        self._wire.transmit(_SERVER, packet)

    def _read(self, packet: list[Buffer]) -> PlainAnswer | None:
        try:
            answer = read_answer(decode(packet))
        except ProtocolError:
            return None  # Damaged on the way: it will be asked for again.
        return answer if answer.sequence == self._sequence else None

    def _good(self, answer: PlainAnswer | None, ask: Ask) -> PlainAnswer:
        if answer is None:
            doubt = "" if ask in (Ask.HELLO, Ask.GET) else f" Whether it made this {ask.value} is not known."
            raise CommTimeout(
                f"The server at {self._address} did not answer within {self._timeout_s:g} s: nothing listens "
                f"there, the key is not its key, or the address is not written as it shows it.{doubt}",
                peer=self._address,
            )
        if answer.outcome is WishOutcome.UNKNOWN_CLIENT:
            raise PeerLost(
                f"The server at {self._address} does not know this client: it was started anew, or has forgotten "
                "who left; make a new client.",
                peer=self._address,
            )
        if answer.outcome is WishOutcome.REFUSED:
            raise SpecError(answer.reason)
        self.version = answer.version
        return answer


def reply_address(server: str) -> str:
    """A place to listen on the network through which the server is reached."""
    if server.startswith("ipc://@"):
        return f"ipc://@shoal-{os.getpid()}-{secrets.token_hex(8)}"
    if server.startswith("ipc:///"):
        return f"{server.rpartition('/')[0]}/*"
    host, port = _split(server)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        # Connecting a datagram socket sends nothing; it only asks the system for the way.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            here = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"There is no way to the server's address {server} ({error.strerror}).") from None
    return f"tcp://[{here}]:*" if ":" in here else f"tcp://{here}:*"


def _split(address: str) -> tuple[str, int]:
    transport, _, host_and_port = address.partition("://")
    port = host_and_port.rpartition(":")[2]
    if transport != "tcp" or not host_of(host_and_port) or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise SpecError(
            f"A server's address is tcp://ADDRESS:PORT, ipc:///FOLDER/NAME or ipc://@NAME, found {address!r}; "
            "copy what the server shows as its address."
        )
    return host_of(host_and_port), int(port)
