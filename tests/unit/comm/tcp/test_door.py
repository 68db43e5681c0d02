"""Who may wait before the door, and for how long."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from shoal.comm.security import RunKey
from shoal.comm.tcp.door import MOST_HALF_OPEN, Door
from shoal.comm.tcp.stream_channel import ChannelDoor, StreamChannel
from shoal.errors import CommError, PeerLost, ProtocolError

GUARD_S = 20.0
KEY, OTHER_KEY = RunKey.create(), RunKey.create()


def knock(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), GUARD_S)


def until(happened: Callable[[], bool], door: Door) -> None:
    deadline = time.monotonic() + GUARD_S
    while not happened():
        assert time.monotonic() < deadline
        assert door.admit() == []
        time.sleep(0.002)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("tcp://127.0.0.1:*", KEY, handshake_s=0.3)
    yield door
    door.close()


def test_few_wait_and_the_oldest_goes_first(door: Door) -> None:
    callers = [knock(door.address) for _ in range(MOST_HALF_OPEN // 2)]
    until(lambda: door.half_open == len(callers), door)
    more = [knock(door.address) for _ in range(MOST_HALF_OPEN)]
    until(lambda: door.strangers == len(callers), door)
    assert door.half_open == MOST_HALF_OPEN
    assert callers[0].recv(1) == b"", "nothing was said to it"
    for caller in (*callers, *more):
        caller.close()


def test_who_proves_nothing_in_time_is_hung_up_on(door: Door) -> None:
    with knock(door.address) as silent, knock(door.address) as slow:
        slow.sendall(b"shoal-1\np" + bytes(32))
        until(lambda: door.strangers == 2, door)
        assert silent.recv(1) == b"" and len(slow.recv(100)) == 64, "a nonce and a proof, and no more"
    assert not door.half_open


def test_who_hangs_up_waits_no_more(door: Door) -> None:
    knock(door.address).close()
    until(lambda: door.strangers == 1, door)
    assert not door.half_open


@pytest.fixture(params=[None, True])
def channels(request: pytest.FixtureRequest) -> Iterator[tuple[StreamChannel, StreamChannel]]:
    found = pair_of(request.param)
    yield found
    for channel in found:
        channel.close()


def pair_of(encrypt: bool | None) -> tuple[StreamChannel, StreamChannel]:
    """Both ends of a channel; who calls must not wait for who listens in the same thread."""
    from concurrent.futures import ThreadPoolExecutor

    listener = ChannelDoor("tcp://127.0.0.1:*", KEY, encrypt=encrypt)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(StreamChannel.call, listener.address, KEY, encrypt=encrypt)
        deadline, came = time.monotonic() + GUARD_S, list[StreamChannel]()
        while not came:
            assert time.monotonic() < deadline
            came = listener.collect()
        ours = calling.result(GUARD_S)
    listener.close()
    return ours, came[0]


def test_messages_go_both_ways_in_order(channels: tuple[StreamChannel, StreamChannel]) -> None:
    ours, theirs = channels
    assert ours.poll() is None
    for number in range(100):
        ours.send({"kind": "number", "n": number})
        theirs.send({"kind": "back", "n": -number})
    assert [theirs.receive(GUARD_S) for _ in range(100)] == [{"kind": "number", "n": n} for n in range(100)]
    assert [ours.receive(GUARD_S) for _ in range(100)] == [{"kind": "back", "n": -n} for n in range(100)]
    assert ours.local_address == theirs.peer_address == "127.0.0.1"
    assert theirs.receive(0.01) is None


def test_a_large_message_goes_in_pieces_and_nobody_waits(channels: tuple[StreamChannel, StreamChannel]) -> None:
    ours, theirs = channels
    large = {"kind": "large", "text": "x" * (20 << 20)}
    assert ours.try_send(large) and ours.has_unsent
    assert not ours.try_send({"kind": "next"}), "there is no room until the first has left"
    deadline, found = time.monotonic() + GUARD_S, None
    while found is None:
        assert time.monotonic() < deadline
        ours.flush()
        found = theirs.poll()
    assert found == large and not ours.has_unsent


def test_what_was_said_last_is_heard_before_the_end(channels: tuple[StreamChannel, StreamChannel]) -> None:
    ours, theirs = channels
    ours.send({"kind": "last"})
    ours.close()
    assert theirs.receive(GUARD_S) == {"kind": "last"}
    with pytest.raises(PeerLost, match="closed its end"):
        theirs.receive(GUARD_S)
    with pytest.raises(PeerLost):
        for _ in range(1000):
            theirs.send({"kind": "to nobody"})
            time.sleep(0.001)


def test_a_message_that_is_announced_too_large_is_refused(channels: tuple[StreamChannel, StreamChannel]) -> None:
    ours, theirs = channels
    ours._socket.send(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="announces"):
        theirs.receive(GUARD_S)


def test_who_cannot_be_called_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(CommError, match=rf"{address} .*--interface"):
        StreamChannel.call(address, KEY)


def test_who_has_another_key_is_told_so_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    listener = ChannelDoor("tcp://127.0.0.1:*", KEY)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(StreamChannel.call, listener.address, OTHER_KEY)
        while not calling.done():
            assert listener.collect() == []
        with pytest.raises(CommError, match="has not this run's key"):
            calling.result()
    deadline = time.monotonic() + GUARD_S
    while not listener.strangers:
        assert listener.collect() == [] and time.monotonic() < deadline
    listener.close()


def test_who_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CommError, match="has not answered in time"):
            StreamChannel.call(address, KEY, timeout_s=0.2)
