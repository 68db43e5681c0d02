"""TLS records of ours: OpenSSL reads and writes the same, and whatever is changed on its way is found."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.comm.security import RunKey
from shoal.comm.tcp.handshake import Guard, Steps, answer, call, read_exactly, write_all
from shoal.comm.tcp.records import LONG_BYTES, PLAIN_BYTES, RecordStream
from shoal.errors import CommError, PeerLost, ProtocolError

GUARD = Guard.of(RunKey.create(), "tcp://127.0.0.1:1", encrypt=True)
BULK = replace(GUARD, is_bulk=True)
LONG = bytes(range(256)) * 4099
CIPHER, SECRET = "TLS_AES_256_GCM_SHA384", bytes(range(48))
LENGTH = 4
"""Where the last byte of a plain record's length is; a long one's has two more."""

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield ends
    for end in ends:
        end.close()


def together(*both: Steps) -> list[object]:
    """What two ends come to, each in its own time."""
    found: dict[int, object] = {}
    for _ in range(100_000):
        for number in {0, 1} - found.keys():
            try:
                next(both[number])
            except StopIteration as over:
                found[number] = over.value
            except (OSError, CommError) as error:
                found[number] = error
        if len(found) == 2:
            return [found[0], found[1]]
    raise AssertionError("they wait for each other")


@pytest.mark.parametrize(("calling", "listening"), [(BULK, BULK), (BULK, GUARD), (GUARD, BULK)])
def test_what_one_end_writes_the_other_reads_whoever_made_the_records(
    pair: Pair, calling: Guard, listening: Guard
) -> None:
    caller, listener = together(call(pair[0], calling), answer(pair[1], listening))
    assert isinstance(caller, RecordStream if calling.is_bulk else ssl.SSLSocket)
    assert isinstance(listener, RecordStream if listening.is_bulk else ssl.SSLSocket)
    sizes = (PLAIN_BYTES + 1, PLAIN_BYTES, LONG_BYTES + 1, LONG_BYTES)
    for content in (b"a few words", LONG, b"", *(LONG[:size] for size in sizes)):
        half = len(content) // 2

        def read(half: int = half, rest: int = len(content) - half) -> Steps[bytes]:
            first = yield from read_exactly(listener, half)
            return first + (yield from read_exactly(listener, rest))

        assert together(write_all(caller, content), read()) == [None, content]
    caller.close()
    assert isinstance(together(read_exactly(listener, 1), iter_nothing())[0], PeerLost)
    listener.close()


def iter_nothing() -> Steps[None]:
    return
    yield


def test_openssl_that_says_goodbye_is_heard(pair: Pair) -> None:
    caller, listener = together(call(pair[0], GUARD), answer(pair[1], BULK))
    assert isinstance(caller, ssl.SSLSocket) and isinstance(listener, RecordStream)
    together(write_all(caller, b"the last words"), iter_nothing())
    with pytest.raises(ssl.SSLWantReadError):
        caller.unwrap()
    room = memoryview(bytearray(100))
    assert listener.recv_into(room) == 14 and room[:14] == b"the last words"
    assert listener.recv_into(room) == 0 and listener.recv_into(room) == 0
    caller.close()
    listener.close()


@pytest.fixture(params=[True, False], ids=["long", "plain"])
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def records(pair: Pair, is_long: bool) -> list[bytearray]:
    """Three of them, as they are on their way."""
    sender = RecordStream(pair[0], CIPHER, SECRET, is_long=is_long)
    found = []
    for content in (b"one" * 40, b"two" * 40, b"three" * 40):
        assert sender.send(content) == len(content)
        found.append(bytearray(pair[1].recv(10_000)))
    return found


def test_nothing_is_in_the_clear(records: list[bytearray]) -> None:
    assert not any(word in record for record in records for word in (b"one", b"two", b"three"))
    assert all(record[:3] == b"\x17\x03\x03" for record in records)


@pytest.mark.parametrize("at", [0, 2, LENGTH, 8, 60, -1])
def test_a_bit_that_was_changed_on_its_way_is_found(
    pair: Pair, records: list[bytearray], is_long: bool, at: int
) -> None:
    records[1][6 if at == LENGTH and is_long else at] ^= 1
    room, receiver = memoryview(bytearray(120)), RecordStream(pair[1], CIPHER, SECRET, is_long=is_long)
    pair[0].send(b"".join(records))
    assert receiver.recv_into(room) == 120 and bytes(room) == b"one" * 40
    with pytest.raises(ProtocolError):
        receiver.recv_into(room)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2)])
def test_a_record_that_is_missing_or_comes_twice_is_found(
    pair: Pair, records: list[bytearray], is_long: bool, order: tuple[int, ...]
) -> None:
    receiver = RecordStream(pair[1], CIPHER, SECRET, is_long=is_long)
    pair[0].send(b"".join(records[number] for number in order))
    with pytest.raises(ProtocolError, match="changed on its way"):
        receiver.recv_into(memoryview(bytearray(1000)))


def test_what_announces_too_much_is_refused_before_it_comes(pair: Pair, is_long: bool) -> None:
    receiver = RecordStream(pair[1], CIPHER, SECRET, is_long=is_long)
    pair[0].send(b"\x17\x03\x03" + (b"\x00\x10\x00\x00" if is_long else b"\xff\xff"))
    with pytest.raises(ProtocolError, match="no record"):
        receiver.recv_into(memoryview(bytearray(1000)))


def test_the_secrets_stay_in_this_process(pair: Pair) -> None:
    """What OpenSSL tells about them is in a file without a name, closed with the handshake."""
    caller, listener = together(call(pair[0], BULK), answer(pair[1], BULK))
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    assert not [target for target in targets if "shoal-secrets" in target]
    for end in (caller, listener):
        assert isinstance(end, RecordStream)
        end.close()
