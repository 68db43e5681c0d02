"""Damaged packets and garbage at the plain parameter server: nothing is changed, nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import shoal
from helpers.fuzz import fuzz_port
from helpers.memory import require_flat_under
from helpers.under_fire import TRIES, Target, Volley, let_wires_leak, shot_at
from shoal.comm.codec import encode
from shoal.comm.security import RunKey
from shoal.ps.plain.messages import Ask, Request, write_request
from shoal.ps.plain.tensors import pack

GUARD_S = 60.0
KEY = RunKey.create()
LIMIT_MIB = 8.0
# Large enough that memory would tell if damaged packets were kept, though they are few.
VALUES = 2048


def packets() -> list[list[bytes]]:
    """Genuine requests with something to damage."""
    parts = {"client": bytes(16), "names": ("w",)}
    bulk = pack({"w": torch.ones(VALUES)})
    asks = (Ask.UPDATE, Ask.STORE, Ask.AVERAGE, Ask.MERGE)
    requests = [Request(ask=ask, sequence=2, bulk=bulk, **parts) for ask in asks]
    return [[bytes(part) for part in encode(write_request(request, "tcp://127.0.0.1:9"))] for request in requests]


@contextmanager
def open_server() -> Iterator[Target]:
    with (
        shoal.ps.Server({"w": torch.zeros(VALUES)}, key=KEY, merging=shoal.ps.Merging()) as server,
        shoal.ps.Client(server.address, key=KEY, timeout_s=GUARD_S) as client,
    ):
        yield Target(address=server.address, refused=lambda: server.refused, look=lambda: time.sleep(0.01))
        assert server.version == 0 and server.strangers > 0
        assert client.get()["w"].tolist() == [0.0] * VALUES
        assert client.update({"w": torch.ones(VALUES)}) == 1


def withstand(frames: int, tries: int = TRIES) -> None:
    def shoot(address: str, number: int) -> Volley:
        shots = frames if number else frames // 4
        return Volley(shots=shots, sent_bytes=fuzz_port(address, KEY, shots, seed=number, valid=packets()))

    damage = shot_at(open_server, shoot, limit_mib=LIMIT_MIB, tries=tries)
    require_flat_under(damage.sent_bytes, damage.grown_bytes, LIMIT_MIB)


def test_damaged_packets_and_garbage_do_nothing():
    withstand(5_000)


def test_a_server_that_keeps_damaged_packets_is_noticed(monkeypatch):
    let_wires_leak(monkeypatch)
    with pytest.raises(AssertionError, match="memory grew"):
        withstand(3_750, tries=2)
