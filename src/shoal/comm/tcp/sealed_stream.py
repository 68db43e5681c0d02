"""`SealedStream`: TLS on a socket that does not wait, for the end that reads bulk.

Python's `SSLSocket` asks the kernel twice for every 16 KiB that it reads. Here TLS works on memory, and the socket
is asked for many records at once, which takes 0.6 of the processor time. Writing gains nothing by it: what TLS
has made would have to be copied out of that memory again.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Any, Protocol

_WRITE_BYTES = 256 << 10
_READ_BYTES = 256 << 10


class ByteStream(Protocol):
    """What both a plain socket and a sealed one are to those who talk through them."""

    def send(self, content: memoryview | bytes, /) -> int: ...

    def recv(self, count: int, /) -> bytes: ...

    def recv_into(self, room: memoryview, /) -> int: ...

    def fileno(self) -> int: ...

    def getsockname(self) -> Any: ...

    def getpeername(self) -> Any: ...

    def close(self) -> None: ...


class SealedStream:
    """A `ByteStream` over a socket that does not wait, which is its own from then on. `BlockingIOError` where
    nothing has come, `SSLWantWriteError` where nothing can leave now. One thread at a time uses it."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._socket = sock
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arriving, self._leaving, server_side=server_side)
        self._unsent = memoryview(b"")
        """Records that the socket has not taken yet."""
        self._taken = 0
        """Bytes of the caller's that these are."""
        self._room = memoryview(b"")
        self.fileno, self.close = sock.fileno, sock.close
        self.getsockname, self.getpeername = sock.getsockname, sock.getpeername

    def do_handshake(self) -> None:
        """Go on with it, as far as that can be done without waiting."""
        while True:
            self._send_records()
            try:
                self._tls.do_handshake()
                self._send_records()
                return
            except ssl.SSLWantReadError:
                self._send_records()
                self._take_in(_READ_BYTES >> 4)
            except ssl.SSLError:
                with suppress(OSError):
                    self._send_records()  # why it has failed
                raise

    def send(self, content: memoryview | bytes, /) -> int:
        """How many of these bytes have left. Where they could not yet, it wants the same ones again."""
        if not self._taken:
            view = memoryview(content)[:_WRITE_BYTES]
            while self._taken < len(view):
                self._taken += self._tls.write(view[self._taken :])  # one record of 16 KiB
        self._send_records()
        taken, self._taken = self._taken, 0
        return taken

    def recv(self, count: int, /) -> bytes:
        """Up to so many bytes; none where the other end has hung up."""
        found = bytearray(count)
        return bytes(memoryview(found)[: self.recv_into(memoryview(found))])

    def recv_into(self, room: memoryview, /) -> int:
        """Fill as much of this as has come; 0 where the other end has hung up."""
        got = 0
        while got < len(room):
            try:
                count = self._tls.read(len(room) - got, room[got:])
                assert isinstance(count, int)  # as where it is given room
                if not count:
                    break
                got += count
            except ssl.SSLWantReadError:
                if got:
                    break
                self._take_in(_READ_BYTES)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
        return got

    def _send_records(self) -> None:
        while self._unsent or self._leaving.pending:
            if not self._unsent:
                self._unsent = memoryview(self._leaving.read())
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None

    def _take_in(self, most_bytes: int) -> None:
        if len(self._room) < most_bytes:
            self._room = memoryview(bytearray(most_bytes))
        count = self._socket.recv_into(self._room)
        if count:
            self._arriving.write(self._room[:count])
        else:
            self._arriving.write_eof()
