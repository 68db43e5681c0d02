"""The bare wire: peers come and go, and it can be waited for together with something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from shoal.comm.channel import Channel
from shoal.comm.gate import unlock
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import SpecError

GUARD_S = 20.0
KEY = RunKey.create()


@pytest.fixture
def make() -> Iterator[Callable[[], ZmqWire]]:
    made: list[ZmqWire] = []

    def make(address: str = "tcp://127.0.0.1:*") -> ZmqWire:
        made.append(ZmqWire(address, key=KEY, linger_s=0.2))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


def until(happened: Callable[[], object], *wires: ZmqWire) -> None:
    """Poll wires, on which nothing may arrive, until something has happened."""
    deadline = time.monotonic() + GUARD_S
    while not happened():
        assert time.monotonic() < deadline
        for wire in wires:
            assert wire.poll(0.01) is None


def next_packet(wire: ZmqWire) -> list[bytes]:
    deadline = time.monotonic() + GUARD_S
    while (packet := wire.poll(0.1)) is None:
        assert time.monotonic() < deadline
    return [bytes(part) for part in packet]


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:*", "tcp://127.0.0.2:*", "tcp://[::1]:*", "ipc://@shoal-wire"]
)
def test_packets_go_both_ways(make, address):
    here, there = make(address), make()
    here.connect(7, there.address)
    there.connect(3, here.address)
    here.transmit(7, [b"to", b"there"])
    there.transmit(3, [b"back", b""])
    assert next_packet(there) == [b"to", b"there"]
    assert next_packet(here) == [b"back", b""]
    assert (here.strangers, there.strangers) == (0, 0) and not here.gone()


def test_who_leaves_is_gone_and_may_come_back_elsewhere(make):
    here, first, second = make(), make(), make()
    here.connect(1, first.address)
    here.transmit(1, [b"hello"])
    assert next_packet(first) == [b"hello"]
    first.disconnect(1)  # nobody it knows: nothing happens
    here.disconnect(2)
    first.close()
    until(lambda: 1 in here.gone(), here)
    here.transmit(1, [b"lost"])
    here.connect(1, second.address)
    assert not here.gone() and here.peers == {1}
    here.transmit(1, [b"again"])
    assert next_packet(second) == [b"again"]


def test_nobody_listening_is_gone_too(make):
    here, there = make(), make()
    address = there.address.rsplit(":", 1)[0] + ":1"
    here.connect(1, address)
    until(lambda: 1 in here.gone(), here)


def test_an_address_that_cannot_be_is_a_clear_error(make):
    here = make()
    with pytest.raises(SpecError, match=r"peer 4 is 'nonsense'.*tcp://host:port"):
        here.connect(4, "nonsense")
    assert not here.peers


def test_a_new_connection_replaces_the_old_one(make):
    here, old, new = make(), make(), make()
    here.connect(1, old.address)
    here.transmit(1, [b"1"])
    assert next_packet(old) == [b"1"]
    here.connect(1, new.address)
    here.transmit(1, [b"2"])
    assert next_packet(new) == [b"2"]
    assert old.poll(0.0) is None and not here.gone()


def test_what_goes_to_nobody_is_lost(make):
    here, there = make(), make()
    here.transmit(5, [b"nobody"])
    here.connect(5, there.address)
    here.disconnect(5)
    assert not here.peers and not here.gone()


def test_waiting_ends_when_something_else_can_be_read(make):
    wire = make()
    ours, theirs = Channel.pair()
    wire.watch(ours)
    theirs.send({"kind": "stop"})
    started = time.monotonic()
    assert wire.poll(GUARD_S) is None
    assert time.monotonic() - started < GUARD_S / 2 and ours.poll() == {"kind": "stop"}
    wire.unwatch(ours)
    theirs.send({"kind": "unseen"})
    started = time.monotonic()
    assert wire.poll(0.05) is None and time.monotonic() - started >= 0.05
    ours.close()
    theirs.close()


def test_who_knocks_at_a_busy_wire_is_let_in(make):
    """There is always one more packet, yet the newcomer's handshake gets its answer."""
    busy, talker = make("ipc://@shoal-busy-wire"), make("ipc://@shoal-talker")
    talker.connect(1, busy.address)
    for _ in range(2_000):
        talker.transmit(1, [b"chatter"])
    assert next_packet(busy) == [b"chatter"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as newcomer:
        unlock(newcomer, KEY, busy.address, encrypted=False)
        admitted = newcomer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        newcomer.connect(busy.address)
        deadline = time.monotonic() + GUARD_S
        while not admitted.poll(0):
            assert time.monotonic() < deadline
            talker.transmit(1, [b"chatter"])
            assert next_packet(busy) == [b"chatter"]
        newcomer.disable_monitor()
        admitted.close()


@pytest.mark.parametrize("encrypt", [None, True])
def test_over_tcp_a_packet_may_have_parts_of_all_sizes(encrypt):
    packet = [b"", bytes(10), b"x" * (5 << 20), b"", b"y" * 20_000, b"end"]
    with (
        ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=encrypt) as here,
        ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=encrypt) as there,
    ):
        here.connect(1, there.address)
        for _ in range(3):
            here.transmit(1, packet)
        for _ in range(3):
            assert next_packet(there) == packet


def test_over_tcp_a_peer_comes_in_while_the_listener_computes():
    """Nobody polls the listener: a stranger's five seconds are enough for a peer all the same."""
    with ZmqWire("tcp://127.0.0.1:*", key=KEY) as busy, ZmqWire("tcp://127.0.0.1:*", key=KEY) as peer:
        peer.connect(1, busy.address)
        peer.transmit(1, [b"hello"])
        deadline = time.monotonic() + GUARD_S
        while not busy._streams._inbox:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert next_packet(busy) == [b"hello"]


def test_after_many_bytes_a_peer_is_called_anew_and_nothing_is_lost(monkeypatch):
    """A key of AES-GCM is not good for ever."""
    monkeypatch.setattr("shoal.comm.tcp.outgoing.RENEW_BYTES", 100_000)
    with (
        ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=True) as here,
        ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=True) as there,
    ):
        here.connect(1, there.address)
        for number in range(40):
            here.transmit(1, [bytes([number]) * 20_000])
        found = sorted(next_packet(there)[0][0] for _ in range(40))
        assert found == list(range(40)) and not here.gone()


def test_whoever_waits_hears_that_the_wire_has_run_out_of_memory(make, monkeypatch):
    def no_memory(sock: object) -> Iterator[int]:
        raise MemoryError("Unable to allocate 1.00 MiB")
        yield

    here, there = make(), make()
    monkeypatch.setattr("shoal.comm.tcp.stream_wire.read_packet", no_memory)
    here.connect(7, there.address)
    here.transmit(7, [b"to", b"there"])
    with pytest.raises(MemoryError, match=r"1\.00 MiB"):
        next_packet(there)


def test_what_has_come_is_not_waited_for(make):
    here, there = make(), make()
    here.connect(7, there.address)
    numbers = [b"%d" % number for number in range(200)]
    for number in numbers:
        here.transmit(7, [number])
    assert next_packet(there) == [b"0"]
    time.sleep(0.2)  # on any but a very busy machine, all of them are there
    begun, found = time.monotonic(), [b"0"]
    while len(found) < len(numbers):
        found += map(bytes, there.poll(GUARD_S) or ())
    assert found == numbers
    assert time.monotonic() - begun < GUARD_S / 2
