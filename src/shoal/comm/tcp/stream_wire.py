"""Packets between processes over tcp: bulk. A thread moves them, so that they travel while their owner
computes."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping

from shoal.comm.reliable import Packet
from shoal.comm.security import RunKey
from shoal.comm.tcp.door import HANDSHAKE_S, Door
from shoal.comm.tcp.handshake import AGAIN, READ, Guard, Steps
from shoal.comm.tcp.outgoing import OutgoingStream
from shoal.comm.tcp.pacing import HostCable
from shoal.comm.tcp.packets import read_packet
from shoal.comm.tcp.records import ByteStream
from shoal.errors import CommError

_LOOK_EVERY_S = 0.5
_LOOK_OFTEN_S = 0.02
"""While somebody waits before the door, is to be called again, or leaves."""


class StreamWire:
    """What others send comes in through the door; what goes out has a connection to each peer of its own.

    The owner's thread gives and takes packets, and is told through `fileno` that there are some. All sockets
    belong to the wire's thread, which begins when the wire is first used.
    """

    def __init__(
        self,
        key: RunKey,
        *,
        encrypt: bool | None = None,
        linger_s: float = 1.0,
        handshake_s: float = HANDSHAKE_S,
        cable: HostCable | None = None,
    ) -> None:
        """`encrypt`: None where each address decides; `cable`: through which what goes to other hosts is sent."""
        self._key, self._encrypt, self._cable = key, encrypt, cable
        self._linger_s, self._handshake_s = linger_s, handshake_s
        self._door: Door | None = None
        self._ways: dict[int, OutgoingStream] = {}
        self._incoming: dict[int, tuple[ByteStream, Steps[None]]] = {}
        self._inbox: deque[Packet] = deque()
        self._ended_at: dict[OutgoingStream, float] = {}
        self._orders: deque[OutgoingStream] = deque()
        self._moving: set[OutgoingStream] = set()
        """Ways that the thread cares for; those that were left by their owner stay until they are empty."""
        self._again: set[int] = set()
        self._selector = selectors.EpollSelector()
        self._wake, self._news = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._selector.register(self._wake, READ)
        self._is_closing = False
        self._failure: BaseException | None = None
        """What ended the thread before its time: memory that ran out, say."""
        self._thread = threading.Thread(target=self._run, name="shoal-wire", daemon=True)

    # The owner's side.

    def listen(self, address: str) -> str:
        """Let others in at this address; the address with its port."""
        self._door = Door(address, self._key, encrypt=self._encrypt, bulk=True, handshake_s=self._handshake_s)
        self._selector.register(self._door, READ)
        self._start()
        return self._door.address

    def connect(self, peer: int, address: str) -> None:
        """Open the way to a peer, in place of an earlier one."""
        is_slow = self._cable is not None and self._cable.reaches(
            address, self._door.address if self._door else ""
        )
        guard = Guard.of(self._key, address, encrypt=self._encrypt, bulk=True)
        way = OutgoingStream(address, guard, self._cable if is_slow else None)
        self.disconnect(peer)
        self._ways[peer] = way
        self._orders.append(way)
        self._start()
        os.eventfd_write(self._wake, 1)

    def disconnect(self, peer: int) -> None:
        """Close the way to a peer, if there is one; what is queued gets `linger_s` to leave."""
        if (way := self._ways.pop(peer, None)) is not None:
            way.leave_by = time.monotonic() + self._linger_s
            self._ended_at.pop(way, None)
            os.eventfd_write(self._wake, 1)

    def transmit(self, peer: int, packet: Packet) -> None:
        """Queue a packet; its memory is read when the socket takes it. What goes to nobody is lost."""
        way = self._ways.get(peer)
        if way is not None and way not in self._ended_at:
            way.queue.append(packet)
            if len(way.queue) == 1 or way.passage is not None:
                os.eventfd_write(self._wake, 1)

    def receive(self) -> Packet | None:
        """The next packet that has arrived, from anyone."""
        try:
            return self._inbox.popleft()
        except IndexError:
            if self._failure is not None:  # Nothing comes or goes any more: whoever waits would wait for ever.
                raise self._failure from None
            return None

    def fileno(self) -> int:
        """Readable when a packet has arrived or a way has ended; `hush` takes note of it."""
        return self._news

    def hush(self) -> None:
        """Be told no more of what has happened so far."""
        try:
            os.eventfd_read(self._news)
        except BlockingIOError:
            pass  # Nothing has happened.

    @property
    def peers(self) -> frozenset[int]:
        """Who was connected, and not disconnected."""
        return frozenset(self._ways)

    @property
    def strangers(self) -> int:
        """Connections that ended without having shown the run's key."""
        return 0 if self._door is None else self._door.strangers

    def ended_at(self) -> Mapping[int, float]:
        """By peer: when its way ended by itself."""
        if not self._ended_at:
            return {}
        ended = dict(self._ended_at)
        return {peer: ended[way] for peer, way in self._ways.items() if way in ended}

    def close(self) -> None:
        """Close all; what is queued gets `linger_s` to leave."""
        if self._is_closing:
            return
        for peer in list(self._ways):
            self.disconnect(peer)
        self._is_closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._selector.close()
        if self._cable is not None:
            self._cable.close()
        os.close(self._wake)
        os.close(self._news)

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    # The thread's side.

    def _run(self) -> None:
        try:
            while not self._is_closing or self._moving or self._orders:
                self._look()
        except BaseException as failure:
            self._failure = failure
            os.eventfd_write(self._news, 1)
        finally:
            for way in self._moving:
                way.close()
                self._ended_at[way] = time.monotonic()
            for sock, steps in self._incoming.values():
                steps.close()
                sock.close()
            if self._door is not None:
                self._door.close()

    def _look(self) -> None:
        for ready, _ in self._selector.select(self._patience_s()):
            if ready.fileobj is self._door:
                self._admit()
            elif ready.fd == self._wake:
                os.eventfd_read(self._wake)
            elif ready.fd in self._incoming:
                self._take_in(ready.fd)
            elif isinstance(ready.data, OutgoingStream):
                self._move(ready.data)
        for fd in list(self._again):
            self._take_in(fd)
        while self._orders:
            way = self._orders.popleft()
            self._moving.add(way)
            self._move(way)
        now = time.monotonic()
        for way in [one for one in self._moving if one.is_due(now)]:
            self._move(way)
        if self._door is not None and self._door.half_open:
            self._admit()  # Those whose time is over go.

    def _patience_s(self) -> float:
        if self._again:
            return 0.0
        is_busy = self._door is not None and self._door.half_open
        is_busy = is_busy or any(way.waits_for_the_clock for way in self._moving)
        patience_s = _LOOK_OFTEN_S if is_busy else _LOOK_EVERY_S
        if self._cable is None:
            return patience_s
        dues = [way.passage.due_at() for way in self._moving if way.passage is not None]
        return min(patience_s, max(0.0, min(dues, default=math.inf) - time.monotonic()))

    def _admit(self) -> None:
        assert self._door is not None
        for sock in self._door.admit():
            self._incoming[sock.fileno()] = (sock, self._packets(sock))
            self._selector.register(sock.fileno(), READ)
            self._again.add(sock.fileno())  # TLS may have read its first packet already

    def _packets(self, sock: ByteStream) -> Steps[None]:
        while True:
            packet = yield from read_packet(sock)
            self._inbox.append(packet)
            if len(self._inbox) == 1:
                os.eventfd_write(self._news, 1)

    def _take_in(self, fd: int) -> None:
        sock, steps = self._incoming[fd]
        self._again.discard(fd)
        try:
            if (wanted := next(steps)) == AGAIN:
                self._again.add(fd)
            else:
                self._selector.modify(fd, wanted)
        except (OSError, CommError):
            self._selector.unregister(fd)
            del self._incoming[fd]
            sock.close()

    def _move(self, way: OutgoingStream) -> None:
        """Let a way go on, and wait for what it waits for."""
        before = way.fd
        wanted = way.go_on(time.monotonic())
        if before != -1 and way.fd != before:
            self._selector.unregister(before)
        if way.has_ended:
            self._moving.discard(way)
            if way.leave_by is None:
                self._ended_at[way] = time.monotonic()
                os.eventfd_write(self._news, 1)
        elif way.fd != -1:
            register = self._selector.modify if way.fd == before else self._selector.register
            register(way.fd, wanted, way)
