"""How the two ends of a connection prove to each other that they have the run's key.

    caller                                            listener
      language, mode, nonce           ── 41 bytes ──▶
                                      ◀── 64 bytes ──   its nonce, its proof
      its proof                       ── 32 bytes ──▶
      TLS 1.3, where what is sent leaves the host; both show the run's certificate

A proof is a hash of mode and nonces, keyed with the run's key. The listener proves itself first, so that whoever
takes the port of a process that died learns nothing from those who call there. Without TLS a proof is good at one
address only, so that he cannot hand it on to another listener either.

Everything here is a generator of events to wait for at the socket, so that one thread has any number of
connections.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import selectors
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import IO, TypeVar

from shoal.comm.security import RunKey, leaves_host
from shoal.comm.tcp.certificate import certificate_and_key
from shoal.comm.tcp.records import CIPHERS, LONG_RECORDS, ByteStream, RecordStream
from shoal.errors import PeerLost, ProtocolError

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Gives the events to wait for at the socket before it goes on."""
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
AGAIN = 0
"""Nothing to wait for: others may have something to do, too."""

_LANGUAGE = b"shoal-1\n"
_PLAIN, _ENCRYPTED = b"p", b"e"
_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO_BYTES = len(_LANGUAGE) + 1 + _NONCE_BYTES
_WRITE_BYTES = 256 << 10
_MOST_AT_ONCE_BYTES = 4 << 20


@dataclass(frozen=True)
class Guard:
    """Who may talk at an address: those who have the key; and whether they do it in the open."""

    key: RunKey
    address: str
    is_encrypted: bool
    is_bulk: bool = False
    """Whether callers send much, and hear nothing."""

    @classmethod
    def of(cls, key: RunKey, address: str, *, encrypt: bool | None, bulk: bool = False) -> Guard:
        """`encrypt`: None where the address decides: what stays on this host is not encrypted."""
        return cls(key, address, leaves_host(address) if encrypt is None else encrypt, bulk)

    @property
    def mode(self) -> bytes:
        return _ENCRYPTED if self.is_encrypted else _PLAIN

    def proof(self, purpose: bytes, nonces: bytes) -> bytes:
        """What this end shows where these nonces were said."""
        where = b"" if self.is_encrypted else self.address.encode()
        return self.key.proof(purpose, self.mode + nonces + where)


def call(sock: socket.socket, guard: Guard) -> Steps[ByteStream]:
    """The caller's part on a new connection; what to talk through from then on."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    yield from write_all(sock, _LANGUAGE + guard.mode + nonce)
    answer = yield from read_exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
    nonces, shown = nonce + answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(shown, guard.proof(b"tcp-listener", nonces)):
        raise ProtocolError(f"Who listens at {guard.address} has not this run's key.")
    yield from write_all(sock, guard.proof(b"tcp-caller", nonces))
    return (yield from _secured(sock, guard, server_side=False))


def answer(sock: socket.socket, guard: Guard) -> Steps[ByteStream]:
    """The listener's part on a new connection; what to talk through from then on."""
    language = yield from read_exactly(sock, len(_LANGUAGE))
    if language != _LANGUAGE:
        raise ProtocolError("A caller speaks another language.")
    hello = yield from read_exactly(sock, _HELLO_BYTES - len(_LANGUAGE))
    if hello[:1] != guard.mode:
        raise ProtocolError("A caller encrypts where this process does not, or the other way round.")
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = hello[1:] + own
    yield from write_all(sock, own + guard.proof(b"tcp-listener", nonces))
    shown = yield from read_exactly(sock, _PROOF_BYTES)
    if not hmac.compare_digest(shown, guard.proof(b"tcp-caller", nonces)):
        raise ProtocolError("A caller has not this run's key.")
    return (yield from _secured(sock, guard, server_side=True))


def read_exactly(sock: ByteStream, count: int) -> Steps[bytes]:
    """So many bytes."""
    found = bytearray(count)
    yield from read_into(sock, memoryview(found))
    return bytes(found)


def read_into(sock: ByteStream, room: memoryview) -> Steps[None]:
    """As many bytes as there is room for."""
    since_look = 0
    while room:
        try:
            # TLS gives 16 KiB at a time: as little as possible is done for each.
            while room and since_look < _MOST_AT_ONCE_BYTES:
                if not (count := sock.recv_into(room)):
                    raise PeerLost("The other end has hung up.")
                room = room[count:]
                since_look += count
        except ssl.SSLWantWriteError:
            yield WRITE
        except (BlockingIOError, ssl.SSLWantReadError):
            yield READ
        else:
            if room:
                since_look = 0
                yield AGAIN


def write_all(sock: ByteStream, content: bytes | bytearray | memoryview) -> Steps[None]:
    """All of these bytes."""
    view = memoryview(content)
    while view:
        # TLS wants to be given the same bytes again where it could not send them.
        view = view[(yield from attempt(partial(sock.send, view[:_WRITE_BYTES]), WRITE)) :]


def attempt(act: Callable[[], T], awaits: int) -> Steps[T]:
    """Do something at a socket as soon as that can be done without waiting."""
    while True:
        try:
            return act()
        except ssl.SSLWantReadError:
            yield READ
        except ssl.SSLWantWriteError:
            yield WRITE
        except BlockingIOError:
            yield awaits


def _secured(sock: socket.socket, guard: Guard, *, server_side: bool) -> Steps[ByteStream]:
    if not guard.is_encrypted:
        return sock
    if not guard.is_bulk:
        return (yield from _handshaken(sock, _context(guard.key, server_side), server_side))
    with os.fdopen(os.memfd_create("shoal-secrets"), "r+") as told:
        context = _new_context(guard.key, server_side)
        context.keylog_filename = f"/proc/self/fd/{told.fileno()}"
        context.set_alpn_protocols([LONG_RECORDS])
        secured = yield from _handshaken(sock, context, server_side)
        return _with_own_records(secured, told)


def _handshaken(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> Steps[ssl.SSLSocket]:
    secured = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    try:
        yield from attempt(secured.do_handshake, READ)
    except BaseException:
        secured.close()  # it has taken the descriptor from the other
        raise
    return secured


def _with_own_records(secured: ssl.SSLSocket, told: IO[str]) -> ByteStream:
    """The connection without OpenSSL, which has read nothing that came after the handshake."""
    cipher, _, _ = secured.cipher() or ("", "", 0)
    secret = re.search(r"^CLIENT_TRAFFIC_SECRET_0 [0-9a-f]+ ([0-9a-f]+)$", told.read(), re.MULTILINE)
    is_long = secured.selected_alpn_protocol() == LONG_RECORDS
    if cipher not in CIPHERS or secret is None:
        return secured
    sock = socket.socket(fileno=secured.detach())
    sock.setblocking(False)
    return RecordStream(sock, cipher, bytes.fromhex(secret[1]), is_long=is_long)


@lru_cache(maxsize=16)
def _context(key: RunKey, server_side: bool) -> ssl.SSLContext:
    return _new_context(key, server_side)


def _new_context(key: RunKey, server_side: bool) -> ssl.SSLContext:
    """Both ends show the run's certificate, and take no other. TLS 1.3 begins with AES-GCM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    certificate, private = _certificate_and_key(key)
    context.load_verify_locations(cadata=certificate)
    if server_side:
        # Callers only send: what nobody reads would make the kernel reset their connections when they close them.
        context.num_tickets = 0
    # `ssl` reads keys from files alone; this one is in no file system.
    with os.fdopen(os.memfd_create("shoal-certificate"), "w") as file:
        file.write(certificate + private)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


@lru_cache(maxsize=16)
def _certificate_and_key(key: RunKey) -> tuple[str, str]:
    return certificate_and_key(key.certificate_seed())
