"""A listener over tcp. Who has not proven the run's key yet waits before the door: few can, and not for long."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import bound_address, listen
from shoal.comm.tcp.handshake import READ, Guard, Steps, answer
from shoal.comm.tcp.records import ByteStream
from shoal.errors import CommError

MOST_HALF_OPEN = 64
"""Callers that may wait before the door. One more sends the oldest of them away: who has the key needs
milliseconds, and tries again."""
HANDSHAKE_S = 5.0
_BACKLOG = 512
"""Connections that the kernel keeps until they are looked at: with fewer, one that finds no room is tried again a
second later."""
_REST_S = 0.01
_MOST_ACCEPTED = 256
"""At a time, so that a flood of strangers leaves time for those who are in."""


@dataclass
class _Caller:
    fd: int
    sock: socket.socket
    steps: Steps[ByteStream]
    deadline: float


class Door:
    """Never waits. Until a caller has proven the key, all that is taken from it are the 73 bytes of a proof."""

    def __init__(
        self,
        address: str,
        key: RunKey,
        *,
        encrypt: bool | None = None,
        bulk: bool = False,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`bulk`: callers send much, and hear nothing."""
        self._listener = listen(address, backlog=_BACKLOG)
        self.address = bound_address(self._listener)
        """Where this process listens; what others call, letter for letter."""
        self.strangers = 0
        """Connections that ended without having shown the run's key."""
        self._guard = Guard.of(key, self.address, encrypt=encrypt, bulk=bulk)
        self._handshake_s = handshake_s
        self._callers: dict[int, _Caller] = {}
        """Half open, by descriptor; the oldest first."""
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, READ)

    def fileno(self) -> int:
        """Readable, for a selector, when `admit` has something to do."""
        return self._selector.fileno()

    @property
    def half_open(self) -> int:
        """Callers that wait before the door; as long as there are any, `admit` is to be called now and then."""
        return len(self._callers)

    def admit(self) -> list[ByteStream]:
        """Those who have come in since the last call. Their sockets do not wait."""
        admitted: list[ByteStream] = []
        for ready, _ in self._selector.select(0):
            if ready.fileobj is self._listener:
                self._take_callers()
            elif (caller := self._callers.get(ready.fd)) is not None:
                admitted += self._go_on(caller)
        now = time.monotonic()
        for caller in [one for one in self._callers.values() if one.deadline < now]:
            self._send_away(caller)
        return admitted

    def close(self) -> None:
        """Listen no more; those who wait are turned away."""
        for caller in list(self._callers.values()):
            self._send_away(caller)
        self._selector.close()
        self._listener.close()

    def _take_callers(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._make_room()
                return
            if len(self._callers) >= MOST_HALF_OPEN:
                self._send_away(next(iter(self._callers.values())))
            sock.setblocking(False)
            with suppress(OSError):  # It has hung up already.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fd, deadline = sock.fileno(), time.monotonic() + self._handshake_s
            self._selector.register(fd, READ)
            self._callers[fd] = _Caller(fd, sock, answer(sock, self._guard), deadline)

    def _make_room(self) -> None:
        """No descriptor is left for a caller, or it has hung up: somebody goes, or there is a moment's rest."""
        if self._callers:
            self._send_away(next(iter(self._callers.values())))
        else:
            time.sleep(_REST_S)

    def _go_on(self, caller: _Caller) -> list[ByteStream]:
        try:
            self._selector.modify(caller.fd, next(caller.steps))
        except StopIteration as over:
            self._selector.unregister(caller.fd)
            del self._callers[caller.fd]
            return [over.value]
        except (OSError, CommError):
            self._send_away(caller)
        return []

    def _send_away(self, caller: _Caller) -> None:
        self.strangers += 1
        self._selector.unregister(caller.fd)
        del self._callers[caller.fd]
        caller.steps.close()
        caller.sock.close()
