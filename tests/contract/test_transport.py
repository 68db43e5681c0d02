"""One suite for every transport: over tcp, in the open and encrypted, over Unix sockets, and the one in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from helpers.addresses import any_address
from shoal.comm.codec import Message
from shoal.comm.memory_transport import Faults, MemoryNetwork
from shoal.comm.security import RunKey
from shoal.comm.transport import Transport
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import CommTimeout, LaunchError, PeerLost, ProtocolError, SpecError

HANG_GUARD_S = 20.0
KEY = RunKey.create()


def zmq_transports(size: int, via: str, **options) -> list[Transport]:
    options = {"encrypt": True, **options} if via == "tls" else options
    address = any_address("ipc" if via == "ipc" else "tcp")
    transports = [ZmqTransport(rank, key=KEY, address=address, **options) for rank in range(size)]
    roster = {transport.rank: transport.address for transport in transports}
    for transport in transports:
        transport.connect(roster)
    return transports


def memory_transports(size: int, **options) -> list[Transport]:
    network = MemoryNetwork(size, **options)
    return [network.transport(rank) for rank in range(size)]


def together(*functions: Callable[[], object]) -> list[object]:
    """Run functions at the same time, each in a thread, as processes would."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(HANG_GUARD_S) for future in [pool.submit(f) for f in functions]]


@pytest.fixture(params=["tcp", "tls", "ipc", "memory", "lossy memory"])
def make(request) -> Iterator[Callable[[int], list[Transport]]]:
    made: list[Transport] = []

    def make(size: int) -> list[Transport]:
        if request.param == "memory":
            made.extend(memory_transports(size))
        elif request.param == "lossy memory":
            faults = Faults(drop=0.1, delay=0.2, duplicate=0.1, corrupt=0.1, seed=3)
            made.extend(memory_transports(size, faults=faults))
        else:
            made.extend(zmq_transports(size, request.param))
        return made

    yield make
    together(*(transport.close for transport in made))


def test_messages_arrive_once_and_in_order(make):
    first, second = make(2)

    def send() -> None:
        for number in range(600):  # more than a window
            first.send(1, Message("number", {"n": number}))
        first.flush(HANG_GUARD_S)
        first.close()

    def receive() -> list[int]:
        with second:
            return [second.receive(HANG_GUARD_S)[1].fields["n"] for _ in range(600)]

    assert together(send, receive)[1] == list(range(600))
    assert (first.counters.sent, second.counters.received) == (600, 600)


def test_two_senders_do_not_mix(make):
    transports = make(3)

    def send(rank: int) -> None:
        for number in range(50):
            transports[rank].send(0, Message("number", {"n": number, "from": rank}))
        transports[rank].close()

    def receive() -> dict[int, list[int]]:
        got: dict[int, list[int]] = {1: [], 2: []}
        for _ in range(100):
            peer, message = transports[0].receive(HANG_GUARD_S)
            assert message.fields["from"] == peer
            got[peer].append(message.fields["n"])
        transports[0].close()
        return got

    got = together(receive, lambda: send(1), lambda: send(2))[0]
    assert got == {1: list(range(50)), 2: list(range(50))}


def test_frames_of_all_sizes_and_types(make):
    first, second = make(2)
    frames = [
        torch.arange(1_000_003, dtype=torch.float32),
        torch.empty(0, 7),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(12).view(3, 4).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int16),
        b"",
        b"plain",
        bytearray(range(200)),
    ]

    def send() -> None:
        first.send(1, Message("all", {"nested": {"a": [1, None, "ä"]}}, frames))
        first.close()

    def receive() -> Message:
        with second:
            return second.receive(HANG_GUARD_S)[1]

    message = together(send, receive)[1]
    assert message.fields == {"nested": {"a": [1, None, "ä"]}}
    for sent, got in zip(frames, message.frames, strict=True):
        if isinstance(sent, torch.Tensor):
            assert got.dtype == sent.dtype and torch.equal(got, sent)
        else:
            assert bytes(got) == bytes(sent)


def test_memory_may_be_reused_after_flush(make):
    first, second = make(2)
    tensor = torch.ones(500_000)

    def send() -> None:
        for value in range(5):
            tensor.fill_(value)
            first.send(1, Message("t", {"value": value}, [tensor]))
            first.flush(HANG_GUARD_S)
        first.close()

    def receive() -> None:
        for _ in range(5):
            message = second.receive(HANG_GUARD_S)[1]
            second.flush(HANG_GUARD_S)
            assert torch.all(message.frames[0] == message.fields["value"])
        second.close()

    together(send, receive)


def test_silence_is_a_timeout(make):
    first, _ = make(2)
    started = time.monotonic()
    with pytest.raises(CommTimeout, match="rank 1"):
        first.receive(0.05, awaited=1)
    assert time.monotonic() - started >= 0.05


def test_an_unknown_peer_is_an_error(make):
    first, _ = make(2)
    for peer in (0, 2):
        with pytest.raises(ProtocolError, match=r"connected to \[1\]"):
            first.send(peer, Message("k"))


def test_who_left_is_missed_only_where_needed(make):
    first, second, third = make(3)
    second.send(0, Message("last words"))
    missed = threading.Event()

    def stay() -> None:
        assert first.receive(HANG_GUARD_S, awaited=1)[1].kind == "last words"
        with pytest.raises(PeerLost, match="Rank 1"):
            first.receive(HANG_GUARD_S, awaited=1)
        with pytest.raises(PeerLost, match="Rank 1"):
            first.send(1, Message("too late"))
        missed.set()
        assert first.receive(HANG_GUARD_S)[0] == 2
        first.close()

    def speak_later() -> None:
        with pytest.raises(PeerLost):
            third.receive(HANG_GUARD_S, awaited=1)
        assert missed.wait(HANG_GUARD_S)
        third.send(0, Message("still here"))
        third.close()

    def leave() -> None:
        second.close()
        second.close()

    together(stay, leave, speak_later)


def test_who_vanishes_is_reported_to_all(make):
    first, second, third = make(3)
    together(lambda: third.__exit__(ValueError, ValueError(), None))
    for survivor in (first, second):
        with pytest.raises(PeerLost, match="Rank 2 vanished") as caught:
            survivor.receive(HANG_GUARD_S)
        assert caught.value.peer == "2"
        with pytest.raises(PeerLost):
            survivor.send(2, Message("k"))


def test_a_closed_transport_says_so(make):
    first, second = make(2)
    together(first.close, second.close)
    with pytest.raises(ProtocolError, match="closed"):
        first.send(1, Message("k"))
    with pytest.raises(ProtocolError, match="closed"):
        first.receive(0.0)


@pytest.mark.parametrize("via", ["tcp", "tls", "ipc"])
def test_closing_with_a_peer_that_never_answers_does_not_hang(via):
    first, second = zmq_transports(2, via)
    first.send(1, Message("unread", {}, [torch.zeros(8_000_000)]))
    started = time.monotonic()
    first.close()
    assert time.monotonic() - started < HANG_GUARD_S
    second.abort()


def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Port {port} .* another process uses it; choose another"):
            ZmqTransport(0, key=KEY, address=f"tcp://127.0.0.1:{port}")


def test_only_loopback_listens():
    with ZmqTransport(0, key=KEY) as transport:
        port = int(transport.address.rsplit(":", 1)[1])
        listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.laddr.port == port]
        assert [address.ip for address in listening] == ["127.0.0.1"]


def test_strangers_and_other_generations_are_refused():
    old, new = ZmqTransport(0, key=KEY, generation=1), ZmqTransport(1, key=KEY, generation=2)
    roster = {0: old.address, 1: new.address}
    old.connect(roster)
    new.connect(roster)
    old.send(1, Message("stale"))
    with socket.create_connection(("127.0.0.1", int(new.address.rsplit(":", 1)[1]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(CommTimeout):
            new.receive(0.3)
    assert (new.counters.refused, new.counters.received) == (1, 0)
    together(old.abort, new.abort)


def test_faults_strike_and_are_counted():
    faults = Faults(drop=0.2, delay=0.2, duplicate=0.2, corrupt=0.2, seed=5)
    network = MemoryNetwork(2, faults=faults)
    first, second = network.transport(0), network.transport(1)

    def send() -> None:
        with first:
            for number in range(100):
                first.send(1, Message("number", {"n": number}, [b"payload"]))
            first.flush(HANG_GUARD_S)

    def receive() -> list[int]:
        with second:
            return [second.receive(HANG_GUARD_S)[1].fields["n"] for _ in range(100)]

    assert together(send, receive)[1] == list(range(100))
    assert all(network.injected[name] > 0 for name in ("drop", "delay", "duplicate", "corrupt"))
    assert first.counters.repeated > 0 and second.counters.refused > 0 and second.counters.duplicates > 0


def test_faults_are_probabilities():
    with pytest.raises(SpecError, match="drop must be a probability"):
        Faults(drop=2)
