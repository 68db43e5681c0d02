"""Without the run's key nobody gets anything from any socket; and nobody on the network can read along."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import pytest
import zmq

from helpers.addresses import any_address
from helpers.fuzz import bare_connection, greeting
from helpers.memory import require_flat
from helpers.under_fire import Target, Volley, shot_at
from shoal.comm.codec import Message, encode
from shoal.comm.gate import unlock
from shoal.comm.security import RunKey
from shoal.comm.tcp.handshake import READ, WRITE, Guard, Steps, call
from shoal.comm.tcp.packets import write_packet
from shoal.comm.zmq_transport import ZmqTransport
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, PeerLost

GUARD_S = 20.0
KEY, OTHER_KEY = RunKey.create(), RunKey.create()
KINDS = {
    "tcp": ("tcp://127.0.0.1:*", False),
    "ipc": ("ipc://@shoal-gate", False),
    "file": (any_address("ipc"), False),
    "curve": ("tcp://127.0.0.1:*", True),
}
LIMIT_MIB = 1.0
KNOCKS = (50, 250)
"""To warm up, and while memory is measured."""
TURNED_AWAY = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
PLAINTEXT = b"a sentence that anybody would recognise on the wire"

Dealer = zmq.Socket
T = TypeVar("T")


def no_key(dealer: Dealer, address: str) -> None:
    pass


def wrong_password(dealer: Dealer, address: str) -> None:
    unlock(dealer, OTHER_KEY, address, encrypted=False)


def password_of_another_address(dealer: Dealer, address: str) -> None:
    unlock(dealer, KEY, "tcp://127.0.0.1:1", encrypted=False)


def wrong_key_pairs(dealer: Dealer, address: str) -> None:
    unlock(dealer, OTHER_KEY, address, encrypted=True)


def wrong_caller_pair(dealer: Dealer, address: str) -> None:
    """Knows whom it calls, and is no member itself."""
    unlock(dealer, KEY, address, encrypted=True)
    public, secret = zmq.curve_keypair()
    dealer.set(zmq.CURVE_PUBLICKEY, public)
    dealer.set(zmq.CURVE_SECRETKEY, secret)


STRANGERS = [no_key, wrong_password, password_of_another_address, wrong_key_pairs, wrong_caller_pair]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def wire(kind) -> Iterator[ZmqWire]:
    address, encrypt = KINDS[kind]
    with ZmqWire(address, key=KEY, encrypt=encrypt) as wire:
        yield wire


@contextmanager
def calling(address: str, prepare: Callable[[Dealer, str], None]) -> Iterator[Dealer]:
    """A socket that calls once, and has something to say."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RECONNECT_IVL, -1)
        prepare(dealer, address)
        dealer.connect(address)
        try:
            dealer.send(PLAINTEXT, zmq.NOBLOCK)
        except zmq.Again:
            pass  # refused already
        yield dealer


def poll_until(happened: Callable[[], bool], wire: ZmqWire) -> None:
    """Poll a wire, on which nothing may arrive, until something has happened."""
    deadline = time.monotonic() + GUARD_S
    while not happened():
        assert time.monotonic() < deadline
        assert wire.poll(0.01) is None


def next_packet(wire: ZmqWire) -> list[bytes]:
    deadline = time.monotonic() + GUARD_S
    while (packet := wire.poll(0.1)) is None:
        assert time.monotonic() < deadline
    return [bytes(part) for part in packet]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_nothing_and_is_counted(kind, wire, stranger):
    with calling(wire.address, stranger) as dealer:
        poll_until(lambda: wire.strangers > 0, wire)
        assert wire.strangers == 1 and dealer.poll(0) == 0
    with ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=KINDS[kind][1]) as member:
        member.connect(1, wire.address)
        member.transmit(1, [b"from a member"])
        assert next_packet(wire) == [b"from a member"]
    assert wire.strangers == 1


@contextmanager
def open_wire(kind: str) -> Iterator[Target]:
    address, encrypt = KINDS[kind]
    with ZmqWire(address, key=KEY, encrypt=encrypt) as wire:

        def look() -> None:
            assert wire.poll(0.01) is None

        yield Target(address=wire.address, refused=lambda: wire.strangers, look=look)


def knock(address: str, stranger: Callable[[Dealer, str], None], times: int) -> Volley:
    """Call so many times, and each time wait to be turned away."""
    with zmq.Context() as context:
        for _ in range(times):
            with context.socket(zmq.DEALER) as dealer, dealer.get_monitor_socket(TURNED_AWAY) as monitor:
                dealer.set(zmq.LINGER, 0)
                dealer.set(zmq.RECONNECT_IVL, -1)
                stranger(dealer, address)
                dealer.connect(address)
                assert monitor.poll(GUARD_S * 1000), "nobody turns a stranger away"
                dealer.disable_monitor()
    return Volley(shots=times, sent_bytes=0)


STUBBORN = [*((kind, wrong_password) for kind in KINDS), ("tcp", no_key), ("curve", wrong_caller_pair)]
MORE_STUBBORN = [
    (kind, stranger)
    for kind in KINDS
    for stranger in (no_key, wrong_caller_pair)
    if (kind, stranger) not in STUBBORN
]


@pytest.mark.parametrize(
    ("kind", "stranger"), [*STUBBORN, *(pytest.param(*more, marks=pytest.mark.long) for more in MORE_STUBBORN)]
)
def test_a_stubborn_stranger_takes_no_memory(kind, stranger):
    def knock_often(address: str, number: int) -> Volley:
        return knock(address, stranger, KNOCKS[min(number, 1)])

    damage = shot_at(lambda: open_wire(kind), knock_often, limit_mib=LIMIT_MIB)
    require_flat(damage.grown_bytes, LIMIT_MIB)


@pytest.mark.parametrize("kind", ["ipc", "file"])
def test_strangers_that_are_kept_are_noticed(kind):
    """As many connections as above, none of which ends: what each of them holds is seen."""
    kept: list[socket.socket] = []

    def stay(address: str, number: int) -> Volley:
        for _ in range(KNOCKS[min(number, 1)]):
            kept.append(bare_connection(address))
            kept[-1].sendall(greeting(b"PLAIN"))
            assert kept[-1].recv(1)  # somebody is there for it
        return Volley(shots=0, sent_bytes=0)

    damage = shot_at(lambda: open_wire(kind), stay, limit_mib=LIMIT_MIB, tries=1)
    with pytest.raises(AssertionError, match="memory grew"):
        require_flat(damage.grown_bytes, 2 * LIMIT_MIB)


def test_a_stranger_is_counted_by_the_transport_and_lost_to_itself():
    inside, outside = ZmqTransport(0, key=KEY), ZmqTransport(1, key=OTHER_KEY)
    roster = {0: inside.address, 1: outside.address}
    inside.connect(roster)
    outside.connect(roster)
    outside.send(0, Message("let me in"))
    deadline = time.monotonic() + GUARD_S
    while not (inside.counters.strangers and outside.counters.strangers):
        assert time.monotonic() < deadline
        for transport in (inside, outside):
            with pytest.raises((CommTimeout, PeerLost)):
                transport.receive(0.02)
    assert (inside.counters.received, inside.counters.strangers) == (0, 1)
    inside.abort()
    outside.abort()


def own_network_address() -> str:
    addresses = [
        address.address
        for name, each in psutil.net_if_addrs().items()
        for address in each
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    if not addresses:
        pytest.skip("this machine has no address besides loopback")
    return addresses[0]


def test_off_loopback_only_encrypted_members_come_in():
    host = own_network_address()
    with ZmqWire(f"tcp://{host}:*", key=KEY) as wire, ZmqWire("tcp://127.0.0.1:*", key=KEY) as member:
        member.connect(1, wire.address)
        member.transmit(1, [b"from a member"])
        assert next_packet(wire) == [b"from a member"]
        with ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=False) as in_the_open:
            in_the_open.connect(1, wire.address)
            poll_until(lambda: wire.strangers > 0, wire)


class Wiretap:
    """A TCP proxy that writes down what it forwards."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._run, name="shoal-wiretap")
        self._thread.start()

    def _run(self) -> None:
        caller, _ = self._listener.accept()
        with caller, socket.create_connection(self._target) as target:
            back = threading.Thread(target=self._forward, args=(target, caller), name="shoal-wiretap-back")
            back.start()
            self._forward(caller, target)
            target.shutdown(socket.SHUT_RDWR)
            back.join(GUARD_S)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(data)
        except OSError:
            pass  # one side has hung up

    def close(self) -> None:
        self._thread.join(GUARD_S)
        self._listener.close()


def driven(steps: Steps[T], fd: int) -> T:
    """What the steps come to, each once the socket is ready for it."""
    while True:
        try:
            wanted = next(steps)
        except StopIteration as over:
            return over.value
        select.select([fd] * bool(wanted & READ), [fd] * bool(wanted & WRITE), [], GUARD_S)


@pytest.mark.parametrize("encrypt", [False, True])
def test_who_listens_on_the_network_can_read_only_what_is_not_encrypted(encrypt):
    with ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=encrypt) as wire:
        tap = Wiretap(wire.address)
        with bare_connection(tap.address) as bare:
            bare.setblocking(False)
            fd = bare.fileno()
            caller = driven(call(bare, Guard.of(KEY, wire.address, encrypt=encrypt)), fd)
            driven(write_packet(caller, encode(Message("secret", {}, [PLAINTEXT]))), fd)
            assert next_packet(wire)[1] == PLAINTEXT
            caller.close()
        tap.close()
    assert len(tap.heard) > len(PLAINTEXT)
    assert (PLAINTEXT in tap.heard) is not encrypt
    assert KEY.secret not in tap.heard and KEY.text.encode() not in tap.heard
