"""Damaged packets and garbage: nothing crashes, nothing is accepted, memory stays flat."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.fuzz import announced_command, bare_connection, damaged_packets, fuzz_port, greeting, valid_packets
from helpers.memory import flat_memory
from shoal.comm import Message, Reliability, RunKey, ZmqTransport, ZmqWire, decode
from shoal.comm.envelope import Envelope
from shoal.errors import CommTimeout, ProtocolError

GUARD_S = 60.0
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


def test_the_decoder_refuses_all_damage():
    for packet in damaged_packets(2_000, seed=0):
        with pytest.raises(ProtocolError):
            take_in(packet)
    with flat_memory():
        refused = 0
        for packet in damaged_packets(100_000, seed=1):
            try:
                take_in(packet)
            except ProtocolError:
                refused += 1
        assert refused == 100_000


@contextmanager
def fuzzing(address: str, key: RunKey, frames: int, seed: int) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=fuzz_port, args=(address, key, frames, seed), name="shoal-fuzz")
    thread.start()
    yield thread
    thread.join(GUARD_S)


def look(transport: ZmqTransport) -> None:
    """Take in what there is; none of it may be a message."""
    with pytest.raises(CommTimeout):
        transport.receive(0.02)


def withstand(via: str, frames: int) -> None:
    key = RunKey.create()
    target, member = (ZmqTransport(rank, key=key, via=via, reliability=PATIENT) for rank in (0, 1))
    try:
        roster = {0: target.address, 1: member.address}
        target.connect(roster)
        member.connect(roster)
        # The first round is for the allocator: what queues needed it keeps for the next.
        attack_and_count(target, member, key, frames, seed=0)
        with flat_memory(limit_mib=32.0):
            attack_and_count(target, member, key, frames, seed=1)
        assert target.counters.received == 0
        assert target.counters.strangers > 0
        member.send(0, Message("genuine", {"n": 1}))
        assert target.receive(GUARD_S) == (1, Message("genuine", {"n": 1}, []))
    finally:
        for transport in (member, target):
            transport.abort()


def attack_and_count(target: ZmqTransport, member: ZmqTransport, key: RunKey, frames: int, seed: int) -> None:
    """Shoot at the target; every packet must be refused."""
    refused = target.counters.refused
    with fuzzing(target.address, key, frames, seed) as attack:
        deadline = time.monotonic() + GUARD_S
        while (attack.is_alive() or target.counters.refused < refused + frames) and time.monotonic() < deadline:
            look(target)
            look(member)  # it is asked to repeat what it never sent
    assert target.counters.refused == refused + frames


@pytest.mark.parametrize("via", ["tcp", "ipc"])
def test_a_port_withstands_damage_and_garbage(via):
    withstand(via, 5_000)


@pytest.mark.long
@pytest.mark.parametrize("via", ["tcp", "ipc"])
def test_a_port_withstands_a_hundred_thousand(via):
    withstand(via, 100_000)


def test_a_stranger_cannot_announce_more_than_a_frame():
    """ZeroMQ takes memory for what is announced before it knows who speaks."""
    with ZmqWire("tcp://127.0.0.1:*", key=RunKey.create()) as wire, bare_connection(wire.address) as stranger:
        stranger.sendall(greeting(b"PLAIN") + announced_command(1 << 30))
        stranger.settimeout(GUARD_S)
        while stranger.recv(1 << 10):
            pass  # its greeting; then it hangs up
        assert wire.poll(0.0) is None
