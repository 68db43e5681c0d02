"""Bytes take the time that a link says, whoever of a host sends them."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest

from shoal.comm.security import RunKey
from shoal.comm.tcp import pacing
from shoal.comm.tcp.pacing import HostCable, Passage
from shoal.comm.zmq_wire import ZmqWire
from shoal.spec.link import NetworkLink

MBIT = NetworkLink.parse("bandwidth=80mbit,latency=10ms")
"""10 MB in a second."""


def test_processes_of_a_host_take_turns(tmp_path: Path) -> None:
    one, other = (HostCable(MBIT, tmp_path / "link") for _ in range(2))
    first, second, third = one.take(100_000, 5.0), other.take(200_000, 5.0), one.take(100_000, 7.0)
    assert (first.ends_at, second.ends_at, third.ends_at) == pytest.approx((5.01, 5.03, 7.01))
    assert [booked.arrives_at - booked.ends_at for booked in (first, second, third)] == pytest.approx([0.01] * 3)
    one.close()
    other.close()


def test_packets_come_through_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that is told: a large packet and a small one behind it."""
    now = [100.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    cable = HostCable(MBIT, tmp_path / "link")
    queue: deque[list[bytes]] = deque([[bytes(300_000)], [b"small"]])
    passage, arrived = Passage(cable, queue), []
    while queue:
        while (piece := passage.arrived()) is not None:
            arrived.append((now[0], len(piece.content)))
            if piece.ends_packet:
                passage.packet_is_over()
        if queue:
            now[0] = max(now[0] + 1e-4, passage.due_at())
    total = sum(count for _, count in arrived)
    assert total > 300_005 and len(arrived) >= 5
    assert [when for when, _ in arrived] == sorted(when for when, _ in arrived)
    assert arrived[-1][0] - 100.0 == pytest.approx(total / 10e6 + 0.01, abs=2e-3)
    assert passage.due_at() == float("inf")
    cable.close()


def test_a_wire_is_as_slow_as_its_link(tmp_path: Path) -> None:
    key = RunKey.create()
    cable = HostCable(NetworkLink.parse("bandwidth=80mbit,latency=50ms"), tmp_path / "link")
    sender = ZmqWire("tcp://127.0.0.1:*", key=key, cable=cable)
    receiver = ZmqWire("tcp://127.0.0.1:*", key=key)
    try:
        sender.connect(1, receiver.address)
        sender.transmit(1, [b"hello"])
        assert receiver.poll(30.0) is not None
        begun = time.monotonic()
        for number in range(4):
            sender.transmit(1, [bytes([number]), bytes(500_000)])
        found = [receiver.poll(30.0) for _ in range(4)]
        took_s = time.monotonic() - begun
    finally:
        sender.close()
        receiver.close()
    assert [bytes(packet[0]) for packet in found if packet is not None] == [b"\0", b"\1", b"\2", b"\3"]
    # 2 MB at 10 MB/s, and the way: had each packet waited for the one before it, it were 0.4 s.
    assert took_s >= 0.25
