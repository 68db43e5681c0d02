"""The wire: packets between processes that have the run's key, and no promise about them.

On one host ZeroMQ moves them, at Unix sockets; over tcp streams of our own do, with a gate before them.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.comm.codec import MAX_FRAME_BYTES
from shoal.comm.gate import Gate, lock, unlock
from shoal.comm.reliable import Packet
from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import TCP
from shoal.comm.tcp.door import HANDSHAKE_S
from shoal.comm.tcp.pacing import HostCable
from shoal.comm.tcp.stream_wire import StreamWire
from shoal.errors import LaunchError, SpecError

# What a vanished peer sent last may still be on its way when its connection ends.
_GRACE_S = 0.05
_BUFFER_BYTES = 1 << 20
# At Unix sockets there are no strangers; and peers come in when the listener's owner polls, who may be in a long
# step.
_HANDSHAKE_AT_HOME_S = 300.0
_HANDSHAKE_BYTES = 4096
_UNIX = "ipc://"
# On a busy wire there is always a packet; those who knock want an answer all the same.
_PACKETS_PER_LOOK = 64


class HasFileno(Protocol):
    """Anything a poller can wait for."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The way to one peer."""

    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Tells when the connection ends."""


class ZmqWire:
    """At a Unix socket one ROUTER takes in everything; one DEALER per peer sends. Peers come and go at any time,
    and those at tcp addresses are reached by a `StreamWire`.

    Binds when made: `tcp://127.0.0.1:*`, `tcp://10.0.0.1:*` for one address of the host, `tcp://10.0.0.1:20000-20100`,
    `ipc:///folder/name`, `ipc:///folder/*` for any free name, or `ipc://@name`, which lies in no file system. At
    Unix sockets only this user comes in. What can be heard outside this host is encrypted; with `encrypt=True`,
    the same for all peers, the rest is too, and with `encrypt=False` nothing is. Over tcp a caller that has not
    shown the key after `handshake_s` is hung up on, and what goes to other hosts passes through `cable`.
    """

    def __init__(
        self,
        bind_address: str,
        *,
        key: RunKey,
        linger_s: float = 1.0,
        encrypt: bool | None = None,
        handshake_s: float = HANDSHAKE_S,
        cable: HostCable | None = None,
    ) -> None:
        self._key = key
        self._encrypt = bool(encrypt)
        self._linger_ms = int(linger_s * 1000)
        self._ways: dict[int, _Way] = {}
        self._peers: dict[zmq.Socket[bytes], int] = {}
        self._ended_at: dict[int, float] = {}
        self._packets_since_look = 0
        self._file = ""
        """Of the socket, where it has one."""
        self._poller = zmq.Poller()
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._gate: Gate | None = None
        self._make_streams = partial(
            StreamWire, key, encrypt=encrypt, linger_s=linger_s, handshake_s=handshake_s, cable=cable
        )
        self._streams: StreamWire | None = None
        """For tcp; none where all are at Unix sockets."""
        try:
            is_tcp = bind_address.startswith(TCP)
            self.address = self._over_tcp().listen(bind_address) if is_tcp else self._bind(bind_address)
            """Where this process listens; what others pass to `connect`, letter for letter."""
        except BaseException:
            self.close()
            raise

    def _over_tcp(self) -> StreamWire:
        if self._streams is None:
            self._streams = self._make_streams()
            self._poller.register(self._streams.fileno(), zmq.POLLIN)
        return self._streams

    def _bind(self, address: str) -> str:
        """Listen at a Unix socket."""
        address = _pick_name(address)
        _refuse_if_taken(address)
        router = self._router = self._open(zmq.ROUTER)
        router.set(zmq.IPC_FILTER_UID, os.geteuid())
        router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.set(zmq.HANDSHAKE_IVL, round(_HANDSHAKE_AT_HOME_S * 1000))
        lock(router, self._key, encrypted=self._encrypt)
        gate = self._gate = Gate(router)
        for source in (router, *gate.sockets):
            self._poller.register(source, zmq.POLLIN)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise LaunchError(f"This process cannot listen on {address}: {error.strerror}.") from None
        if address.startswith(f"{_UNIX}/"):
            self._file = address.removeprefix(_UNIX)
        address = router.get_string(zmq.LAST_ENDPOINT)
        gate.admit(self._key, address, encrypted=self._encrypt)
        return address

    @property
    def peers(self) -> frozenset[int]:
        """Who is connected, or was until the connection ended by itself."""
        streams = frozenset() if self._streams is None else self._streams.peers
        return streams.union(self._ways)

    @property
    def strangers(self) -> int:
        """Connections that ended without having shown the run's key."""
        return sum(door.strangers for door in (self._streams, self._gate) if door is not None)

    def connect(self, peer: int, address: str) -> None:
        """Open the way to a peer, in place of an earlier one, and watch for its end."""
        self.disconnect(peer)
        if address.startswith(TCP):
            self._over_tcp().connect(peer, address)
            return
        dealer = self._open(zmq.DEALER)
        # Whoever listens there after a peer's death is not that peer.
        dealer.set(zmq.RECONNECT_IVL, -1)
        # Nothing comes back this way, so nobody who listens there can fill our memory.
        dealer.set(zmq.RCVHWM, 1)
        dealer.set(zmq.MAXMSGSIZE, _HANDSHAKE_BYTES)
        # A peer in the middle of something answers late; one that died ends the connection.
        dealer.set(zmq.HANDSHAKE_IVL, 0)
        unlock(dealer, self._key, address, encrypted=self._encrypt)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._poller.register(monitor, zmq.POLLIN)
        self._peers[monitor] = peer
        self._ways[peer] = _Way(dealer=dealer, monitor=monitor)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            self.disconnect(peer)
            raise SpecError(
                f"The address of peer {peer} is {address!r}, which cannot be ({error.strerror}); "
                "write it as the listener does: tcp://host:port or ipc:///folder/name."
            ) from None

    def disconnect(self, peer: int) -> None:
        """Close the way to a peer, if there is one; what is queued gets `linger_s` to leave."""
        if self._streams is not None:
            self._streams.disconnect(peer)
        if (way := self._ways.pop(peer, None)) is None:
            return
        self._poller.unregister(way.monitor)
        del self._peers[way.monitor]
        way.dealer.disable_monitor()
        way.monitor.close(linger=0)
        way.dealer.close(linger=0 if peer in self._ended_at else self._linger_ms)
        self._ended_at.pop(peer, None)

    def transmit(self, peer: int, packet: Packet) -> None:
        """Queue a packet; its memory is read when the socket takes it.

        It is lost, as any packet may be, where the connection has ended or there is none.
        """
        if (way := self._ways.get(peer)) is None:
            if self._streams is not None:
                self._streams.transmit(peer, packet)
            return
        try:
            way.dealer.send_multipart(packet, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # Queues have no limit, so only a connection that ended refuses; without this, sending would wait.
            self._ended_at.setdefault(peer, time.monotonic())

    def poll(self, timeout_s: float) -> Packet | None:
        """The next packet; None after `timeout_s`, or earlier when something else happened."""
        if self._packets_since_look >= _PACKETS_PER_LOOK:
            self._look(0.0)  # What has come already is waited for by nobody.
        if (packet := self._receive()) is not None:
            self._packets_since_look += 1
            return packet
        self._look(timeout_s)
        return self._receive()

    def watch(self, source: HasFileno) -> None:
        """Let `poll` return also when this can be read: a channel, a socket, a pipe."""
        self._poller.register(source.fileno(), zmq.POLLIN)

    def unwatch(self, source: HasFileno) -> None:
        """Watch this no more; call it before the source is closed."""
        self._poller.unregister(source.fileno())

    def gone(self) -> Collection[int]:
        """Peers whose connection ended, once what they sent last has had time to arrive."""
        streams = {} if self._streams is None else self._streams.ended_at()
        ended_at = {**self._ended_at, **streams}
        if not ended_at:
            return ()
        ripe = time.monotonic() - _GRACE_S
        return [peer for peer, moment in ended_at.items() if moment < ripe]

    def close(self) -> None:
        """Close all; what is queued gets `linger_s` to leave."""
        if self._context.closed:
            return
        for peer in list(self._ways):
            self.disconnect(peer)
        if self._file:
            with suppress(FileNotFoundError):  # Its folder went first.
                os.unlink(self._file)  # While this process still listens there, so that it is nobody else's.
        if self._streams is not None:
            self._streams.close()
        if self._router is not None:
            self._router.disable_monitor()
            self._router.close(linger=0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self, timeout_s: float) -> None:
        self._packets_since_look = 0
        for source, _ in self._poller.poll(math.ceil(timeout_s * 1000)):
            if source in self._peers:
                parse_monitor_message(source.recv_multipart())
                self._ended_at.setdefault(self._peers[source], time.monotonic())
            elif self._gate is not None and source in self._gate.sockets:
                self._gate.attend()
            elif self._streams is not None and source == self._streams.fileno():
                self._streams.hush()

    def _receive(self) -> Packet | None:
        """What has come through either, without the routing identity that ZeroMQ puts before it."""
        if self._streams is not None and (packet := self._streams.receive()) is not None:
            return packet
        if self._router is None:
            return None
        try:
            _identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer for frame in frames] or [b""]

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        # No limit on queued messages: who sends keeps count of what is under way, and nothing is dropped.
        opened.set_hwm(0)
        opened.set(zmq.SNDBUF, _BUFFER_BYTES)
        opened.set(zmq.RCVBUF, _BUFFER_BYTES)
        return opened


def _pick_name(address: str) -> str:
    """The address with a name that nobody has in place of `*`."""
    if address.startswith(_UNIX) and address.endswith("/*"):
        return address.removesuffix("*") + secrets.token_hex(8)
    return address


def _refuse_if_taken(address: str) -> None:
    """Whoever binds a socket's file takes it from another, and ZeroMQ does not ask whether that one lives."""
    if not address.startswith(f"{_UNIX}/"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix(_UNIX))
        except (FileNotFoundError, ConnectionRefusedError):
            return  # Nobody ever was there, or who was there has died.
        except BlockingIOError:
            pass  # So many call there that it cannot keep up.
        except OSError as error:
            raise LaunchError(f"This process cannot listen on {address}: {error.strerror}.") from None
    raise LaunchError(f"The socket {address} was asked for, but another process uses it; choose another name.")
