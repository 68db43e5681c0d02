"""TLS 1.3's records for bulk, made and read here: for less processor time than OpenSSL's.

Python's `ssl` sends each 16 KiB with a system call of its own, and receives them with two. For bulk OpenSSL does
the handshake alone, as it does where a kernel has TLS; the secret that it came to protects what follows (RFC 8446,
5.2, 5.3 and 7.3). AES-GCM is `cryptography`'s.

Two forms of records. *Plain* ones are TLS's: the other end may be OpenSSL. *Long* ones, where both ends have named
them in the handshake (ALPN), have up to 256 KiB, a length of four bytes, and nothing but content.

Only callers send bulk: theirs is the one secret that is needed.
"""

from __future__ import annotations

import hmac
import socket
import struct
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import ProtocolError

if TYPE_CHECKING:
    from shoal.comm.codec import Buffer

CIPHERS = {"TLS_AES_256_GCM_SHA384": ("sha384", 32), "TLS_AES_128_GCM_SHA256": ("sha256", 16)}
"""By name: the hash that secrets are made with, and the bytes of a key."""
LONG_RECORDS = "shoal-long-records/1"
"""The name in the handshake."""
PLAIN_BYTES, LONG_BYTES = 16 << 10, 256 << 10
"""The most content of a record."""
_PLAIN_HEAD, _LONG_HEAD = struct.Struct(">BHH"), struct.Struct(">BHI")
_NONCE_BYTES = 12
_TAG_BYTES = 16
_VERSION = 0x0303
_CONTENT, _ALERT = 0x17, 0x15


class ByteStream(Protocol):
    """What packets pass through: a socket that does not wait, or records on one."""

    def send(self, content: Buffer, /) -> int: ...

    def recv(self, count: int, /) -> bytes: ...

    def recv_into(self, room: memoryview, /) -> int: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...

    def getsockname(self) -> Any: ...

    def getpeername(self) -> Any: ...


class RecordStream:
    """Either end of a connection whose handshake is done. The caller's sends, the listener's receives."""

    def __init__(self, sock: socket.socket, cipher: str, secret: bytes, *, is_long: bool) -> None:
        """`secret`: the caller's, for what follows the handshake. `is_long`: which form records have."""
        # Who has no bulk, as a host's agent, has no need of it.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        name, key_bytes = CIPHERS[cipher]
        self._damage = InvalidTag
        self._socket = sock
        self._cipher = AESGCM(_expanded(secret, b"key", key_bytes, name))
        self._iv = int.from_bytes(_expanded(secret, b"iv", _NONCE_BYTES, name), "big")
        self._number = 0
        """Of the next record."""
        self._is_long = is_long
        self._head = _LONG_HEAD if is_long else _PLAIN_HEAD
        self._most_bytes = LONG_BYTES if is_long else PLAIN_BYTES
        """Of a record's content; a plain one has a byte more, which says what it is."""
        self._most_sealed = self._most_bytes + (_TAG_BYTES if is_long else 256)
        self._sealed = memoryview(b"")
        """A record on its way: what has come of it or, where this end sends, all of it."""
        self._come = 0
        self._unsent = memoryview(b"")
        self._taken = 0
        """Bytes of the caller's that the unsent record holds."""
        self._opened = memoryview(b"")
        """What has been opened, and found no room yet."""
        self._has_ended = False
        """Whether the caller has said so."""
        self.recv, self.fileno, self.close = sock.recv, sock.fileno, sock.close
        self.getsockname, self.getpeername = sock.getsockname, sock.getpeername

    def send(self, content: Buffer, /) -> int:
        """How many of these bytes have left. Where they could not yet, it wants the same ones again."""
        if not self._taken:
            self._seal(memoryview(content)[: self._most_bytes])
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        taken, self._taken = self._taken, 0
        return taken

    def _seal(self, content: memoryview) -> None:
        if not content:
            return
        room = self._memory()
        inner = content if self._is_long else bytes(content) + bytes([_CONTENT])
        size = len(inner) + _TAG_BYTES
        head = self._head.pack(_CONTENT, _VERSION, size)
        end = len(head) + size
        room[: len(head)] = head
        self._cipher.encrypt_into(self._nonce(), inner, head, room[len(head) : end])
        self._unsent, self._taken = room[:end], len(content)

    def recv_into(self, room: memoryview, /) -> int:
        """Fill as much of this as has come; 0 where the other end has hung up."""
        filled = 0
        while filled < len(room):
            if self._opened:
                count = min(len(self._opened), len(room) - filled)
                room[filled : filled + count] = self._opened[:count]
                self._opened = self._opened[count:]
                filled += count
            elif size := self._whole_size():
                filled += self._open(size, room[filled:])
            elif self._has_ended or not self._take_in(waits=not filled):
                break
        return filled

    def _whole_size(self) -> int:
        """Of the record that has come, after its head; 0 where there is more of it to come."""
        size = self._announced()
        return size if size and self._come >= self._head.size + size else 0

    def _announced(self) -> int:
        if self._come < self._head.size:
            return 0
        kind, version, size = self._head.unpack_from(self._sealed)
        if kind != _CONTENT or version != _VERSION or not _TAG_BYTES < size <= self._most_sealed:
            raise ProtocolError("What has come is no record of TLS.")
        return int(size)

    def _take_in(self, *, waits: bool) -> int:
        """More of this record, and the head of the next; how many bytes, 0 where the other end has hung up or,
        where nobody is to wait, nothing has come."""
        room = self._memory()
        wanted = self._announced() + (2 if self._announced() else 1) * self._head.size
        try:
            count = self._socket.recv_into(room[self._come : wanted])
        except BlockingIOError:
            if waits:
                raise
            return 0
        self._come += count
        return count

    def _open(self, size: int, room: memoryview) -> int:
        """Open the record, straight into this room where it is large enough; how many bytes are there."""
        begin = self._head.size
        end = begin + size
        inner = size - _TAG_BYTES
        fits = inner <= len(room)
        found = room[:inner] if fits else memoryview(bytearray(inner))
        try:
            self._cipher.decrypt_into(self._nonce(), self._sealed[begin:end], self._sealed[:begin], found)
        except self._damage:
            raise ProtocolError("A record was changed on its way.") from None
        self._come -= end
        self._sealed[: self._come] = self._sealed[end : end + self._come]
        content = inner if self._is_long else self._content_of(found)
        if fits:
            return content  # the byte behind it, if there is one, is written over
        self._opened = found[:content]
        return 0

    def _content_of(self, inner: memoryview) -> int:
        """How much of a plain record is content."""
        if inner[-1] == _ALERT:
            self._has_ended = True
            return 0
        if inner[-1] != _CONTENT:
            raise ProtocolError("A caller sends what is no content.")
        return len(inner) - 1

    def _memory(self) -> memoryview:
        if not self._sealed:
            self._sealed = memoryview(bytearray(self._most_sealed + 2 * self._head.size))
        return self._sealed

    def _nonce(self) -> bytes:
        number, self._number = self._number, self._number + 1
        return (self._iv ^ number).to_bytes(_NONCE_BYTES, "big")


def _expanded(secret: bytes, label: bytes, count: int, name: str) -> bytes:
    """HKDF-Expand-Label, for no more bytes than one hash has."""
    label = b"tls13 " + label
    about = count.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
    return hmac.digest(secret, about + b"\1", name)[:count]
