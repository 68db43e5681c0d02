"""`StreamChannel`: small messages between two processes on different hosts, both ways on one connection.

What a `Channel` is on one host, without file descriptors: a message is a dict of plain data, written as msgpack,
and both ends learn when the other is gone. The two have proven the run's key to each other before the first.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from shoal.comm.channel import MOST_BYTES, pack_message, read_message
from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import target_of
from shoal.comm.tcp.door import Door
from shoal.comm.tcp.handshake import READ, WRITE, Guard, Steps, call
from shoal.comm.tcp.records import ByteStream
from shoal.errors import CommError, CommTimeout, PeerLost, ProtocolError

_LENGTH = struct.Struct("<I")
_MOST_UNSENT_BYTES = 4 << 20
"""With more than that on its way, `try_send` takes no other message."""
_READ_BYTES = 64 << 10
_CALL_AGAIN_S = 0.05
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamChannel:
    """One end of it. Several threads may send; one receives."""

    def __init__(self, sock: ByteStream, peer: str) -> None:
        """`sock`: what `Door.admit` or a call gave; it does not wait."""
        self._socket = sock
        self._peer = peer
        self.local_address: str = sock.getsockname()[0]
        """This host's own address, as this connection uses it."""
        self.peer_address: str = sock.getpeername()[0]
        self._lock = threading.Lock()  # TLS does not read and write at the same time
        self._unsent = bytearray()
        self._received = bytearray()
        self._arrived: deque[dict[str, Any]] = deque()
        self._has_ended = False

    @classmethod
    def call(
        cls, address: str, key: RunKey, *, encrypt: bool | None = None, timeout_s: float = 15.0
    ) -> StreamChannel:
        """Call who listens at this address, and prove to each other that both have the key."""
        guard, deadline = Guard.of(key, address, encrypt=encrypt), time.monotonic() + timeout_s
        while True:
            try:
                return cls(_called(address, guard, deadline), address)
            except (PeerLost, ConnectionResetError, BrokenPipeError):
                # Among many strangers one may be turned away; whoever has the key is let in soon.
                if time.monotonic() + _CALL_AGAIN_S > deadline:
                    raise PeerLost(f"{address} hangs up on this run; is it another one's?", peer=address) from None
                time.sleep(_CALL_AGAIN_S)
            except OSError as error:
                raise PeerLost(
                    f"Nobody can be called at {address} ({error.strerror or error}); check the address and the "
                    "firewall, or name the network with --interface.",
                    peer=address,
                ) from None

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Waits while the other side takes nothing."""
        while not self.try_send(message):
            self._wait(select.POLLIN | select.POLLOUT, None)

    def try_send(self, message: dict[str, Any]) -> bool:
        """Send one message if there is room for it; whether there was. What is left of it goes with the next
        call."""
        payload = pack_message(message)
        if len(payload) > MOST_BYTES:
            raise ProtocolError(
                f"a message of kind {message.get('kind')!r} has {len(payload)} bytes, and a channel carries "
                f"{MOST_BYTES}; send less, or write it to a file and send its path."
            )
        with self._lock:
            self._flush()
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                return False
            self._unsent += _LENGTH.pack(len(payload)) + payload
            self._flush()
        return True

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was sent is on its way; PeerLost where that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self._unsent:
            if time.monotonic() > deadline:
                raise self._lost()
            self._wait(select.POLLOUT, 1.0)
            self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for the socket to take it: call `flush` when it can."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what can be sent now."""
        with self._lock:
            self._flush()

    def poll(self) -> dict[str, Any] | None:
        """The next message; None where none has arrived, and then not before `fileno` can be read."""
        with self._lock:
            with suppress(PeerLost):  # It may have said something before.
                self._flush()
            if not self._arrived and not self._has_ended:
                self._take_in()
        if self._arrived:
            return self._arrived.popleft()
        if self._has_ended:
            raise self._lost()
        return None

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, waiting for it so long; None where none came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), left_s)
        return message

    def fileno(self) -> int:
        """The socket, for a selector; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up. The other side receives what was sent, then PeerLost."""
        with self._lock, suppress(PeerLost):
            self._flush()
        self._socket.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                # TLS wants the same bytes again where it could not send them: they stay in front.
                count = self._socket.send(memoryview(self._unsent)[:_READ_BYTES].tobytes())
            except _NOT_NOW:
                return
            except OSError:
                raise self._lost() from None
            del self._unsent[:count]

    def _take_in(self) -> None:
        while not self._arrived:
            try:
                found = self._socket.recv(_READ_BYTES)
            except _NOT_NOW:
                return
            except OSError:
                found = b""
            if not found:
                self._has_ended = True
                return
            self._received += found
            self._cut_messages()

    def _cut_messages(self) -> None:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MOST_BYTES:
                raise ProtocolError(f"{self._peer} announces a message of {length} bytes; it is refused.")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            payload = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            self._arrived.append(read_message(payload, self._peer))

    def _wait(self, events: int, timeout_s: float | None) -> None:
        poller = select.poll()
        poller.register(self._socket, events)
        poller.poll(None if timeout_s is None else timeout_s * 1000)

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self._peer} has closed its end of the channel.", peer=self._peer)


class ChannelDoor:
    """Where others call to have a channel; those who have not the key come to nothing."""

    def __init__(self, address: str, key: RunKey, *, encrypt: bool | None = None) -> None:
        self._door = Door(address, key, encrypt=encrypt)
        self.address = self._door.address
        """Where to call."""

    @property
    def strangers(self) -> int:
        """Connections that ended without having shown the run's key."""
        return self._door.strangers

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to do."""
        return self._door.fileno()

    def collect(self) -> list[StreamChannel]:
        """Channels to those who have come in since the last call. Never waits."""
        found = []
        for sock in self._door.admit():
            try:
                found.append(StreamChannel(sock, f"the process at {sock.getpeername()[0]}"))
            except OSError:
                sock.close()  # It has come and gone.
        return found

    def close(self) -> None:
        """Let nobody in any more."""
        self._door.close()


def _called(address: str, guard: Guard, deadline: float) -> ByteStream:
    family, target = target_of(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(target)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _driven(call(sock, guard), sock.fileno(), deadline, address)
    except BaseException:
        sock.close()
        raise


def _driven(steps: Steps[ByteStream], fd: int, deadline: float, address: str) -> ByteStream:
    """What the steps come to, waiting for each."""
    events = {READ: select.POLLIN, WRITE: select.POLLOUT}
    poller = select.poll()
    try:
        while True:
            poller.register(fd, events[next(steps)])
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise CommTimeout(f"Who listens at {address} has not answered in time.", peer=address)
    except StopIteration as over:
        return over.value
    except CommError:
        steps.close()
        raise
