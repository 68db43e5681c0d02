"""A shelf for one file descriptor, which lies there for all processes of a host that come by.

It is a pair of connected sockets. What is sent at one end waits at the other, where whoever wants it looks without
taking it away: the kernel keeps what the descriptor stands for alive as long as anybody holds the shelf. So memory
that a process made outlives it, and who holds the shelf need not know what lies on it, nor open it.
"""

from __future__ import annotations

import os
import select
import socket
from array import array
from collections.abc import Callable

_MOST_BYTES = 4096
_POLL_MS = 50


class FdShelf:
    """Both ends. A label lies with the descriptor."""

    def __init__(self, front: socket.socket, back: socket.socket) -> None:
        self._front, self._back = front, back

    @classmethod
    def make(cls) -> FdShelf:
        """An empty one."""
        return cls(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    @classmethod
    def of(cls, fds: tuple[int, ...]) -> FdShelf:
        """The one that another process has made, whose descriptors this one was given; they stay open."""
        front, back = (socket.socket(fileno=os.dup(fd)) for fd in fds)
        return cls(front, back)

    @property
    def fds(self) -> tuple[int, int]:
        """What another process needs to use it."""
        return self._front.fileno(), self._back.fileno()

    def put(self, label: str, fd: int) -> None:
        """Leave a copy of a descriptor here for good. One process does so, once."""
        socket.send_fds(self._back, [label.encode()], [fd])

    def look(self) -> tuple[str, int] | None:
        """The label, and a descriptor of this process's own; None where nothing lies here."""
        if not select.select([self._front], [], [], 0)[0]:
            return None
        # Not `recv_fds`, which takes flags and leaves them out.
        room = socket.CMSG_LEN(array("i", [0]).itemsize)
        label, carried, _, _ = self._front.recvmsg(_MOST_BYTES, room, socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
        return label.decode(), array("i", carried[0][2])[0]

    def wait(self, on_idle: Callable[[], None] | None = None) -> tuple[str, int]:
        """The same once something lies here; `on_idle` is called meanwhile, and raises to give up."""
        while (found := self.look()) is None:
            if not select.select([self._front], [], [], _POLL_MS / 1e3)[0] and on_idle is not None:
                on_idle()
        return found

    def close(self) -> None:
        """Let go of it."""
        self._front.close()
        self._back.close()
