"""A receiver in a process of its own, shot at from another: how much its memory grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from helpers.forked import in_processes
from helpers.memory import MIB, held
from shoal.comm.reliable import Packet
from shoal.comm.zmq_wire import ZmqWire
from shoal.spec import World

GUARD_S = 55.0
TRIES = 4
"""Measured rounds at most. An allocator keeps what a round needed and grows in some; a leak grows in all."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Who is shot at."""

    address: str
    refused: Callable[[], int]
    """How many shots it has refused so far."""
    look: Callable[[], None]
    """Takes in what there is, or lets a little time pass where somebody else does that."""


@dataclass(frozen=True, kw_only=True)
class Volley:
    """What was sent in one round."""

    shots: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What the round did to a receiver in which it grew least."""

    grown_bytes: int
    sent_bytes: int


OpenTarget = Callable[[], AbstractContextManager[Target]]
Shoot = Callable[[str, int], Volley]
"""Shoots at an address in a round; the first, number 0, which warms up, may be a shorter one."""


def shot_at(open_target: OpenTarget, shoot: Shoot, *, limit_mib: float, tries: int = TRIES) -> Damage:
    """Shoot at a target, from a process that shares no memory with it, until a round leaves it below the limit.

    All shots must be refused. Round 0 is for the allocator and counts nothing.
    """
    receiver_end, shooter_end = Pipe()

    def work(world: World) -> list[int]:
        if world.global_rank == 0:
            return _receive(open_target, receiver_end, round(limit_mib * MIB), tries)
        return _shoot(shoot, shooter_end)

    with receiver_end, shooter_end:
        (grown_bytes,), (sent_bytes,) = in_processes(2, work)
    return Damage(grown_bytes=grown_bytes, sent_bytes=sent_bytes)


def _receive(open_target: OpenTarget, shooter: Connection, limit_bytes: int, tries: int) -> list[int]:
    grown: list[int] = []
    with open_target() as target:
        _withstand(target, shooter)
        while len(grown) < tries and (not grown or min(grown) >= limit_bytes):
            before = held()
            _withstand(target, shooter)
            grown.append(held().grown_since(before))
        shooter.send(None)
    return [min(grown)]


def _withstand(target: Target, shooter: Connection) -> None:
    """Take in one round: until the shooter says how much it was, and all of it has been refused."""
    already = target.refused()
    shooter.send(target.address)
    deadline, expected = time.monotonic() + GUARD_S, None
    while expected is None or target.refused() < expected:
        assert time.monotonic() < deadline, f"{target.refused() - already} shots were refused"
        target.look()
        if expected is None and shooter.poll():
            expected = already + shooter.recv()
    assert target.refused() == expected


def _shoot(shoot: Shoot, receiver: Connection) -> list[int]:
    for number in count():
        assert receiver.poll(GUARD_S), "the receiver is not ready"
        if (address := receiver.recv()) is None:
            break
        volley = shoot(address, number)
        receiver.send(volley.shots)
    return [volley.sent_bytes]


def let_wires_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make wires, also in processes forked from here on, keep every packet that they take in."""
    kept: list[Packet] = []
    genuine = ZmqWire.poll

    def poll(wire: ZmqWire, timeout_s: float) -> Packet | None:
        if (packet := genuine(wire, timeout_s)) is not None:
            kept.append(packet)
        return packet

    monkeypatch.setattr(ZmqWire, "poll", poll)
