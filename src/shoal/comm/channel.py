"""`Channel`: small messages between two processes of one host, over a Unix socket that keeps their borders.

A message is a dict of plain data, written as msgpack; file descriptors may travel with it. One that is too long
for the socket travels in a memory file, whose descriptor goes with it. Both ends learn at once when the other is
gone.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack

from shoal.errors import PeerLost, ProtocolError

LIMIT_BYTES = 128 * 1024
"""As much goes through the socket itself. Below the kernel's default buffer of one, so that it always fits."""
MOST_BYTES = 64 << 20
"""The largest message."""
CUTTABLE = ("traceback", "text")
CUT_MARK = "[… cut: too long for one message …]\n"
MAX_FDS = 8

_IN_FILE = ""
"""The only key of a message that says how many bytes of the last descriptor's file are the message itself."""
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED)


class Channel:
    """One end of a connection between two processes. Several threads may send; one receives."""

    def __init__(self, sock: socket.socket, peer: str = "the other process") -> None:
        sock.setblocking(False)
        self._socket = sock
        self._peer = peer

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, one to keep and one to hand to another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end that another process handed to this one; the channel owns `fd` from now on."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message, with copies of `fds`. Waits while the other side's buffer is full."""
        while not self.try_send(message, fds):
            _wait_until(self._socket, select.POLLOUT, None)

    def try_send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send one message if the other side's buffer has room for it; whether it had."""
        if len(fds) > MAX_FDS:
            raise ProtocolError(f"a message carries at most {MAX_FDS} file descriptors, found {len(fds)}.")
        with _carried(_encode(message), fds) as (payload, carried):
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", carried))] if carried else []
            try:
                self._socket.sendmsg([payload], extra, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._translated(error) from None
        return True

    def poll(self) -> dict[str, Any] | None:
        """The next message, or None where none has arrived."""
        received = self.poll_with_fds()
        if received is None:
            return None
        message, fds = received
        for fd in fds:
            os.close(fd)
        return message

    def poll_with_fds(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and the file descriptors that came with it, which are now the caller's."""
        try:
            payload, extra, flags = self._receive_raw()
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._translated(error) from None
        fds = _fds_of(extra)
        try:
            if not payload:
                raise self._lost()
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError(
                    f"a message from {self._peer} is over {LIMIT_BYTES} bytes, or has more than {MAX_FDS} file "
                    "descriptors; it is refused."
                )
            message = read_message(payload, self._peer)
            if message.keys() == {_IN_FILE}:
                message = read_message(_read_file(message[_IN_FILE], fds, self._peer), self._peer)
            return message, fds
        except (PeerLost, ProtocolError):
            for fd in fds:
                os.close(fd)
            raise

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, waiting for it so long; None where none came in time."""
        if (message := self.poll()) is not None:
            return message
        return self.poll() if _wait_until(self._socket, select.POLLIN, timeout_s) else None

    def receive_with_fds(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and the file descriptors that came with it, however long it takes."""
        while (received := self.poll_with_fds()) is None:
            _wait_until(self._socket, select.POLLIN, None)
        return received

    def finish(self) -> None:
        """Say that nothing more will be sent; the other side's last words can still be received."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def peer_uid(self) -> int:
        """The user at the other end, as the kernel knows it."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return struct.unpack("3i", credentials)[1]

    def fileno(self) -> int:
        """The socket, for a selector; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up. The other side receives what was sent, then PeerLost."""
        self._socket.close()

    def _receive_raw(self) -> tuple[bytes, Sequence[tuple[int, int, bytes]], int]:
        room_for_fds = socket.CMSG_SPACE((MAX_FDS + 1) * array.array("i").itemsize)
        arguments = (LIMIT_BYTES, room_for_fds, socket.MSG_CMSG_CLOEXEC)
        try:
            return self._socket.recvmsg(*arguments)[:3]
        except ConnectionResetError:
            # The peer left without reading all that we sent. The kernel says so once, before its last words.
            return self._socket.recvmsg(*arguments)[:3]

    def _translated(self, error: OSError) -> Exception:
        return self._lost() if error.errno in _GONE else error

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self._peer} has closed its end of the channel.", peer=self._peer)


def _wait_until(sock: socket.socket, events: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def _encode(message: dict[str, Any]) -> bytes:
    payload = pack_message(message)
    if len(payload) <= LIMIT_BYTES:
        return payload
    cuttable = [key for key in CUTTABLE if isinstance(message.get(key), str)]
    rest = len(pack_message({key: value for key, value in message.items() if key not in cuttable}))
    # Half of what is left, so that two long fields fit as well; the end of a traceback is what matters.
    room = (LIMIT_BYTES - rest) // 2 - 256
    if cuttable and room > 0:
        return pack_message({**message, **{key: _cut(message[key], room) for key in cuttable}})
    if len(payload) > MOST_BYTES:
        raise ProtocolError(
            f"a message of kind {message.get('kind')!r} has {len(payload)} bytes, and a channel carries "
            f"{MOST_BYTES}; send less, or write it to a file and send its path."
        )
    return payload


@contextmanager
def _carried(payload: bytes, fds: Sequence[int]) -> Iterator[tuple[bytes, Sequence[int]]]:
    """A message as it goes through the socket, and the descriptors with it: of a long one, also its file's."""
    if len(payload) <= LIMIT_BYTES:
        yield payload, fds
        return
    with os.fdopen(os.memfd_create("shoal-message"), "wb", buffering=0) as file:
        file.write(payload)
        yield pack_message({_IN_FILE: len(payload)}), [*fds, file.fileno()]


def _read_file(size: Any, fds: list[int], peer: str) -> bytes:
    """What lies in the file whose descriptor came last, which is closed."""
    if type(size) is not int or not 0 < size <= MOST_BYTES or not fds:
        raise ProtocolError(f"a message from {peer} should lie in a file, but no such file came; it is refused.")
    with os.fdopen(fds.pop(), "rb", buffering=0) as file:
        payload = os.pread(file.fileno(), size, 0)
    if len(payload) < size:
        raise ProtocolError(f"a message from {peer} is not all there; it is refused.")
    return payload


def _cut(text: str, room_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= room_bytes:
        return text
    return CUT_MARK + encoded[-room_bytes:].decode("utf-8", "ignore")


def pack_message(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    try:
        return msgpack.packb(message, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"a message of kind {message.get('kind')!r} is not plain data ({error}); send only text, "
            "numbers, booleans, lists and dicts."
        ) from None


def read_message(payload: bytes, peer: str) -> dict[str, Any]:
    """The message that `pack_message` wrote; `ProtocolError` for anything else."""
    try:
        message = msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message from {peer} cannot be read ({error}); it is refused.") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a message from {peer} must be a dict, found {type(message).__name__}.")
    return message


def _fds_of(extra: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
