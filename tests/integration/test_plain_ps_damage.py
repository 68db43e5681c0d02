"""Damaged packets and garbage at the plain server and at a store: nothing is changed, nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import shoal
from helpers.fuzz import fuzz_port
from helpers.kv_servers import ServerThreads
from helpers.memory import require_flat_under
from helpers.under_fire import TRIES, OpenTarget, Target, Volley, let_wires_leak, shot_at
from shoal.comm.codec import encode
from shoal.comm.security import RunKey
from shoal.kv.messages import ChangeMade, CopyPart, write_letter
from shoal.kv.requests import KvRequest, carried
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


def packets_for_stores() -> list[list[bytes]]:
    """The same for a key-value store, and what its servers say to each other."""
    table, look = torch.ones(VALUES, 1), (VALUES, 1, "float32")
    named = {"client": bytes(16), "sequence": 2, "key": "t"}
    push = KvRequest(ask="push", **named, **carried(table, torch.arange(VALUES)))
    requests = [push, KvRequest(ask="init", look=look, **named, **carried(table))]
    letters = [
        ChangeMade(shard=0, generation=1, index=9, request=push),
        CopyPart(shard=0, generation=1, asked=0, offset=0, behind=-1, data=table),
    ]
    messages = [write_request(request, "tcp://127.0.0.1:9") for request in requests]
    messages += [write_letter(letter) for letter in letters]
    return [[bytes(part) for part in encode(message)] for message in messages]


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


@contextmanager
def open_store() -> Iterator[Target]:
    with ServerThreads(1, key=KEY) as servers, servers.store(through_memory=False) as store:
        store.init("t", torch.zeros(VALUES, 1))
        store.set_optimizer("sgd", lr=1.0)
        server = servers.servers[0]
        yield Target(address=servers.addresses[0], refused=lambda: server.refused, look=lambda: time.sleep(0.01))
        assert server.wire.strangers > 0
        assert not store.pull("t").any()
        assert store.pushpull("t", torch.ones(VALUES, 1)).tolist() == [[-1.0]] * VALUES


def withstand(
    frames: int,
    tries: int = TRIES,
    open_target: OpenTarget = open_server,
    valid: Callable[[], list[list[bytes]]] = packets,
) -> None:
    def shoot(address: str, number: int) -> Volley:
        shots = frames if number else frames // 4
        return Volley(shots=shots, sent_bytes=fuzz_port(address, KEY, shots, seed=number, valid=valid()))

    damage = shot_at(open_target, shoot, limit_mib=LIMIT_MIB, tries=tries)
    require_flat_under(damage.sent_bytes, damage.grown_bytes, LIMIT_MIB)


def test_damaged_packets_and_garbage_do_nothing():
    withstand(5_000)


def test_damaged_packets_and_garbage_do_nothing_to_a_store():
    withstand(5_000, open_target=open_store, valid=packets_for_stores)


def test_a_server_that_keeps_damaged_packets_is_noticed(monkeypatch):
    let_wires_leak(monkeypatch)
    with pytest.raises(AssertionError, match="memory grew"):
        withstand(3_750, tries=2)
