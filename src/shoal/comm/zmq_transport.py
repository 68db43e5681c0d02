"""The ZeroMQ transport: TCP on loopback, or Unix sockets with abstract names, which leave no file behind."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Collection

import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.comm.codec import MAX_FRAME_BYTES
from shoal.comm.linked import LinkedTransport
from shoal.comm.reliable import Packet, Reliability
from shoal.comm.transport import Roster
from shoal.errors import LaunchError, SpecError, unknown

_LOOPBACK = "127.0.0.1"
# What a vanished peer sent last may still be on its way when its connection ends.
_GRACE_S = 0.05
_BUFFER_BYTES = 1 << 20


class ZmqTransport(LinkedTransport):
    """Messages over ZeroMQ. Binds when made; `connect` once the addresses of all are known.

    `via` is "tcp" (on loopback, `port` 0 for any free one) or "ipc".
    """

    def __init__(
        self,
        rank: int,
        *,
        via: str = "tcp",
        port: int = 0,
        generation: int = 0,
        reliability: Reliability | None = None,
    ) -> None:
        reliability = reliability or Reliability()
        self._zmq = _ZmqWire(_bind_address(via, port), linger_s=reliability.linger_s)
        super().__init__(rank, self._zmq, generation=generation, reliability=reliability)

    @property
    def address(self) -> str:
        """Where this process listens; what others find in the roster."""
        return self._zmq.address

    def connect(self, roster: Roster) -> None:
        """Connect to everyone in the roster but ourselves."""
        if self._links:
            raise SpecError(f"Rank {self.rank} is connected already; make a new transport for a new roster.")
        peers = sorted(set(roster) - {self.rank})
        for peer in peers:
            self._zmq.connect(peer, roster[peer])
        self._link_to(peers)


def _bind_address(via: str, port: int) -> str:
    if via == "tcp":
        return f"tcp://{_LOOPBACK}:{port or '*'}"
    if via == "ipc":
        return f"ipc://@shoal-{os.getpid()}-{secrets.token_hex(8)}"
    raise unknown("transport", via, ("tcp", "ipc"))


class _ZmqWire:
    """One ROUTER takes in everything; one DEALER per peer sends."""

    def __init__(self, bind_address: str, *, linger_s: float) -> None:
        self._context = zmq.Context()
        self._linger_ms = int(linger_s * 1000)
        self._router = self._open(zmq.ROUTER)
        self._router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._ended_at: dict[int, float] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        try:
            self._router.bind(bind_address)
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(bind_address, error) from None
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)

    def connect(self, peer: int, address: str) -> None:
        """Open the way to a peer, and watch for its end."""
        dealer = self._open(zmq.DEALER)
        # Whoever listens there after a peer's death is not that peer.
        dealer.set(zmq.RECONNECT_IVL, -1)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._monitors[monitor] = peer
        self._poller.register(monitor, zmq.POLLIN)
        dealer.connect(address)
        self._dealers[peer] = dealer

    def transmit(self, peer: int, packet: Packet) -> None:
        """Queue a packet; its memory is read when the socket takes it."""
        try:
            self._dealers[peer].send_multipart(packet, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # Queues have no limit, so only a connection that ended refuses; without this, sending would wait.
            self._ended_at.setdefault(peer, time.monotonic())

    def poll(self, timeout_s: float) -> Packet | None:
        """The next packet, without the routing identity that ZeroMQ puts before it."""
        if (packet := self._receive()) is not None:
            return packet
        for socket, _ in self._poller.poll(math.ceil(timeout_s * 1000)):
            if socket in self._monitors:
                parse_monitor_message(socket.recv_multipart())
                self._ended_at.setdefault(self._monitors[socket], time.monotonic())
        return self._receive()

    def gone(self) -> Collection[int]:
        """Peers whose connection ended, once what they sent last has had time to arrive."""
        if not self._ended_at:
            return ()
        ripe = time.monotonic() - _GRACE_S
        return [peer for peer, ended_at in self._ended_at.items() if ended_at < ripe]

    def close(self) -> None:
        """Close all; what is queued gets `linger_s` to leave."""
        for peer, dealer in self._dealers.items():
            dealer.disable_monitor()
            dealer.close(linger=0 if peer in self._ended_at else self._linger_ms)
        for monitor in self._monitors:
            monitor.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    def _receive(self) -> Packet | None:
        try:
            _identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [frame.buffer for frame in frames] or [b""]

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # No limit on queued messages: the window of each link is the limit, and it drops nothing.
        socket.set_hwm(0)
        socket.set(zmq.SNDBUF, _BUFFER_BYTES)
        socket.set(zmq.RCVBUF, _BUFFER_BYTES)
        return socket


def _bind_error(address: str, error: zmq.ZMQError) -> LaunchError:
    if error.errno == zmq.EADDRINUSE:
        port = address.rsplit(":", 1)[-1]
        return LaunchError(
            f"Port {port} on {_LOOPBACK} was asked for, but another process uses it; "
            "choose another port, or leave it out to get any free one."
        )
    return LaunchError(f"This process cannot listen on {address}: {error.strerror}.")
