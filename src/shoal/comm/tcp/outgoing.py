"""The way to one peer over tcp: called, proven, and then written to. Moved by a wire's thread."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections import deque
from contextlib import suppress

from shoal.comm.reliable import Packet
from shoal.comm.tcp.addresses import target_of
from shoal.comm.tcp.handshake import READ, WRITE, Guard, Steps, call, write_all
from shoal.comm.tcp.pacing import HostCable, Passage
from shoal.comm.tcp.packets import write_packet
from shoal.comm.tcp.records import ByteStream
from shoal.errors import CommError, PeerLost, ProtocolError

CALL_AGAIN_S = 0.05
PATIENCE_S = 300.0
"""For a peer that is busy, or besieged by strangers; at one that died nobody listens."""
RENEW_BYTES = 128 << 30
"""A key of AES-GCM is good for about 2 ** 24.5 records of 16 KiB (RFC 8446, 5.5). Long before that the peer is
called anew; packets may overtake each other then, as on any wire."""


class OutgoingStream:
    """Where packets leave for one peer. Only its `queue` and `leave_by` are its owner's."""

    def __init__(self, address: str, guard: Guard, cable: HostCable | None = None) -> None:
        """`cable`: what is sent is as slow as through it."""
        self._family, self._target = target_of(address)
        self._guard = guard
        self._deadline = time.monotonic() + PATIENCE_S
        self.queue: deque[Packet] = deque()
        self.passage = None if cable is None else Passage(cable, self.queue)
        self.leave_by: float | None = None
        """Until when what is queued may leave, once nobody wants this way any more."""
        self.has_ended = False
        self.fd = -1
        """Of the connection, while there is one."""
        self._sock: ByteStream | None = None
        self._steps: Steps[None] | None = None
        self._is_proven = self._is_idle = False
        self._call_at = 0.0

    @property
    def waits_for_the_clock(self) -> bool:
        """Whether something is to be done that no socket tells of."""
        return self._steps is None or self.leave_by is not None

    def is_due(self, now: float) -> bool:
        """Whether there is something to do though the socket is quiet."""
        if self.leave_by is not None and (now >= self.leave_by or not self.queue):
            return True
        if self._steps is None:
            return now >= self._call_at
        if self.passage is not None and self._is_proven:
            return now >= self.passage.due_at()
        return bool(self._is_idle and self.queue) or (not self._is_proven and now >= self._deadline)

    def go_on(self, now: float) -> int:
        """Do what can be done; what to wait for at the connection."""
        is_over = self.leave_by is not None and (now >= self.leave_by or not self.queue)
        if is_over or (not self._is_proven and now >= self._deadline):
            self._end()
            return 0
        if self._steps is None:
            self._steps = self._send_all()
        try:
            return next(self._steps)
        except StopIteration:
            self._call_again(now)  # for a new key
        except (PeerLost, ConnectionResetError, BrokenPipeError):
            # Who is turned away before anything was proven came among many strangers.
            self._end() if self._is_proven else self._call_again(now)
        except (OSError, CommError):
            self._end()
        return 0

    def close(self) -> None:
        """Hang up."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.fd = -1

    def _send_all(self) -> Steps[None]:
        sock = yield from self._called()
        self._sock, self._is_proven = sock, True
        if self.passage is not None:
            yield from self._send_slowly(sock, self.passage)
            return
        sent_bytes = 0
        while sent_bytes < RENEW_BYTES or not self._guard.is_encrypted:
            while not self.queue:
                self._is_idle = True
                yield READ
                _check_quiet(sock)
            self._is_idle = False
            sent_bytes += yield from write_packet(sock, self.queue[0])
            self.queue.popleft()

    def _send_slowly(self, sock: ByteStream, passage: Passage) -> Steps[None]:
        sent_bytes = 0
        while True:
            while (piece := passage.arrived()) is not None:
                yield from write_all(sock, piece.content)
                sent_bytes += len(piece.content)
                if piece.ends_packet:
                    passage.packet_is_over()
                    if sent_bytes >= RENEW_BYTES and self._guard.is_encrypted:
                        return
            yield READ
            _check_quiet(sock)

    def _called(self) -> Steps[ByteStream]:
        sock = self._sock = socket.socket(self._family, socket.SOCK_STREAM)
        self.fd = sock.fileno()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (number := sock.connect_ex(self._target)) == errno.EINPROGRESS:
            yield WRITE
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        return (yield from call(sock, self._guard))

    def _call_again(self, now: float) -> None:
        self.close()
        if self._is_proven:
            self._deadline = now + PATIENCE_S
        self._is_proven = self._is_idle = False
        self._call_at = now + CALL_AGAIN_S

    def _end(self) -> None:
        self.close()
        self.queue.clear()
        self.has_ended = True


def _check_quiet(sock: ByteStream) -> None:
    """Nobody says anything on this side: what can be read is the end."""
    with suppress(BlockingIOError, ssl.SSLWantReadError):
        raise ProtocolError("A listener speaks.") if sock.recv(1) else PeerLost("The peer has hung up.")
