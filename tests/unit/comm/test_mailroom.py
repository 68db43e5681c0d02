"""Who waits for a peer looks up, also where something new comes again and again, as over a slow link."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.codec import Message
from shoal.comm.group import mailroom
from shoal.comm.group.mailroom import Mailroom
from shoal.comm.memory_transport import MemoryNetwork

RANKS = (0, 1)
PIECES = 40


class Dripping:
    """A transport on which a piece under one tag comes whenever somebody looks, and at last one under another."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self._left = PIECES

    def receive(self, timeout_s: float, *, awaited: int | None = None) -> tuple[int, Message]:
        self._clock[0] += 0.9 * timeout_s
        self._left -= 1
        tag = 1 if self._left else 2
        return 1, Message(
            "group.tensor", {"ranks": list(RANKS), "tag": tag, "left": 0}, [torch.zeros(4, dtype=torch.uint8)]
        )


def test_pieces_that_keep_coming_do_not_keep_a_worker_from_looking_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = [0.0], list[float]()
    monkeypatch.setattr(mailroom.time, "monotonic", lambda: clock[0])
    mail = Mailroom(Dripping(clock), lambda: looks.append(clock[0]))  # type: ignore[arg-type]
    assert len(mail.take(1, RANKS, 2)) == 4
    gaps = [after - before for before, after in zip([0.0, *looks], [*looks, clock[0]], strict=True)]
    assert len(looks) > PIECES / 4 and max(gaps) < 0.3


def test_a_large_tensor_travels_in_pieces_and_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is acknowledged by itself: over a slow link nothing large is sent twice."""
    monkeypatch.setattr(mailroom, "_PIECE_BYTES", 1000)
    network = MemoryNetwork(2)
    sender, receiver = (Mailroom(network.transport(rank), None) for rank in RANKS)
    large, small, none = torch.randn(900), torch.ones(3), torch.empty(0)
    for tag, tensor in ((1, large), (2, small), (1, none), (1, small)):
        sender.send(tensor, 1, RANKS, tag)
    assert sender.transport.under_way(1) == 4 + 3
    assert torch.equal(receiver.take_as(0, RANKS, 2, small), small)
    for expected in (large, none, small):
        assert torch.equal(receiver.take_as(0, RANKS, 1, expected), expected)
