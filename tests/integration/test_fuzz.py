"""Damaged packets and garbage: nothing crashes, nothing is accepted, memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.addresses import any_address
from helpers.fuzz import announced_command, bare_connection, damaged_packets, fuzz_port, greeting, valid_packets
from helpers.memory import held, require_flat_under
from helpers.under_fire import TRIES, Target, Volley, let_wires_leak, shot_at
from shoal.comm.codec import Message, decode
from shoal.comm.envelope import Envelope
from shoal.comm.reliable import Reliability
from shoal.comm.security import RunKey
from shoal.comm.zmq_transport import ZmqTransport
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, ProtocolError

GUARD_S = 60.0
LIMIT_MIB = 8.0
# Damage to the message that is expected next ends a link in the end; here it shall go on for ever.
PATIENT = Reliability(max_refusals=10**9)


def take_in(packet: list[bytes]) -> Message:
    Envelope.unpack(packet[0])
    return decode(packet[1:])


def test_the_packets_that_get_damaged_are_valid():
    assert [take_in(packet).kind for packet in valid_packets()] == ["step", "push", "pull"]


def test_damage_depends_on_the_seed_alone():
    first, again, other = (list(damaged_packets(50, seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("packets", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_the_decoder_refuses_all_damage(packets):
    for packet in damaged_packets(2_000, seed=0):
        with pytest.raises(ProtocolError):
            take_in(packet)
    before, refused, taken_bytes = held(), 0, 0
    for packet in damaged_packets(packets, seed=1):
        taken_bytes += sum(map(len, packet))
        try:
            take_in(packet)
        except ProtocolError:
            refused += 1
    assert refused == packets
    require_flat_under(taken_bytes, held().grown_since(before), LIMIT_MIB)


@contextmanager
def open_port(via: str, key: RunKey) -> Iterator[Target]:
    """A member of a job whose only peer says nothing until the attack is over."""
    port, member = (ZmqTransport(rank, key=key, address=any_address(via), reliability=PATIENT) for rank in (0, 1))
    try:
        roster = {0: port.address, 1: member.address}
        port.connect(roster)
        member.connect(roster)

        def look() -> None:
            for transport in (port, member):  # the member is asked to repeat what it never sent
                with pytest.raises(CommTimeout):
                    transport.receive(0.02)

        yield Target(address=port.address, refused=lambda: port.counters.refused, look=look)
        assert port.counters.received == 0
        assert port.counters.strangers > 0
        member.send(0, Message("genuine", {"n": 1}))
        assert port.receive(GUARD_S) == (1, Message("genuine", {"n": 1}, []))
    finally:
        for transport in (member, port):
            transport.abort()


def withstand(via: str, frames: int, tries: int = TRIES, rows: int = 32) -> None:
    """Tables of so many rows are in a third of the frames: it takes fewer of larger ones for a leak to show."""
    key, valid = RunKey.create(), valid_packets(rows=rows)

    def shoot(address: str, number: int) -> Volley:
        shots = frames if number else frames // 4
        return Volley(shots=shots, sent_bytes=fuzz_port(address, key, shots, seed=number, valid=valid))

    damage = shot_at(lambda: open_port(via, key), shoot, limit_mib=LIMIT_MIB, tries=tries)
    require_flat_under(damage.sent_bytes, damage.grown_bytes, LIMIT_MIB)


@pytest.mark.parametrize("via", ["tcp", "ipc"])
def test_a_port_withstands_damage_and_garbage(via):
    withstand(via, 5_000, rows=64)


@pytest.mark.long
@pytest.mark.parametrize("via", ["tcp", "ipc"])
def test_a_port_withstands_a_hundred_thousand(via):
    withstand(via, 100_000)


def test_a_port_that_keeps_damaged_packets_is_noticed(monkeypatch):
    let_wires_leak(monkeypatch)
    with pytest.raises(AssertionError, match="memory grew"):
        withstand("tcp", 4_250, tries=2, rows=64)


def test_a_stranger_cannot_announce_more_than_a_frame():
    """ZeroMQ takes memory for what is announced before it knows who speaks."""
    with ZmqWire(any_address("ipc"), key=RunKey.create()) as wire, bare_connection(wire.address) as stranger:
        stranger.sendall(greeting(b"PLAIN") + announced_command(1 << 30))
        stranger.settimeout(GUARD_S)
        while stranger.recv(1 << 10):
            pass  # its greeting; then it hangs up
        assert wire.poll(0.0) is None
