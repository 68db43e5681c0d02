"""TLS in large pieces: whatever the socket takes at a time, the bytes are those that were sent."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal.comm.security import RunKey
from shoal.comm.tcp.handshake import _context
from shoal.comm.tcp.sealed_stream import SealedStream

KEY = RunKey.create()
LONG = bytes(range(256)) * 8192
NOT_NOW = (BlockingIOError, ssl.SSLWantWriteError)

Ends = tuple[SealedStream, SealedStream]


@pytest.fixture
def ends() -> Iterator[Ends]:
    sockets = socket.socketpair()
    for one in sockets:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    caller = SealedStream(sockets[0], _context(KEY, False), server_side=False)
    listener = SealedStream(sockets[1], _context(KEY, True), server_side=True)
    open_ones = {caller, listener}
    for _ in range(1000):
        for one in list(open_ones):
            try:
                one.do_handshake()
                open_ones.discard(one)
            except NOT_NOW:
                pass
        if not open_ones:
            break
    assert not open_ones, "they wait for each other"
    yield caller, listener
    for one in sockets:
        one.close()


def test_a_socket_that_takes_little_at_a_time_gets_all_of_it_once(ends: Ends) -> None:
    caller, listener = ends
    left, heard = memoryview(LONG), bytearray()
    was_full = 0
    while len(heard) < len(LONG):
        try:
            if left:
                left = left[caller.send(left) :]
        except NOT_NOW:
            was_full += 1
        try:
            heard += listener.recv(50_000)
        except BlockingIOError:
            pass
    assert bytes(heard) == LONG and was_full, "the socket took everything at once"


def test_who_hangs_up_is_heard_after_what_was_said(ends: Ends) -> None:
    caller, listener = ends
    assert caller.send(b"the last words") == 14
    caller.close()
    room = bytearray(100)
    assert listener.recv_into(memoryview(room)) == 14 and room[:14] == b"the last words"
    assert listener.recv(10) == b"" and listener.recv(10) == b""


def test_a_bit_that_was_changed_on_its_way_is_found() -> None:
    """So frames need no checksums there."""
    (ours, ours_far), (theirs, theirs_far) = socket.socketpair(), socket.socketpair()
    with ours, ours_far, theirs, theirs_far:
        for one in (ours, ours_far, theirs, theirs_far):
            one.setblocking(False)
        caller = SealedStream(ours, _context(KEY, False), server_side=False)
        listener = SealedStream(theirs, _context(KEY, True), server_side=True)
        for _ in range(10):
            for end, far, other in ((caller, ours_far, theirs_far), (listener, theirs_far, ours_far)):
                with suppress(BlockingIOError):
                    end.do_handshake()
                with suppress(BlockingIOError):
                    other.sendall(far.recv(1 << 16))
        caller.send(b"whole")
        theirs_far.sendall(ours_far.recv(1 << 16))
        assert listener.recv(10) == b"whole"
        caller.send(b"changed")
        record = bytearray(ours_far.recv(1 << 16))
        record[7] ^= 1
        theirs_far.sendall(record)
        with pytest.raises(ssl.SSLError):
            listener.recv(10)
