"""Sums between hosts with a slot each: chunks that leave early come to the same, or are dropped by all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.arena.grid import Flat, make_grid
from shoal.comm.group import SocketGroup
from shoal.comm.memory_transport import MemoryNetwork
from shoal.strategies.data.chain import HostChain
from shoal.strategies.data.early import EarlyChunks

HOSTS = 3
GRID = make_grid([Flat("float32", 4, 64) for _ in range(6)], chunk_bytes=256)
CHUNKS = range(len(GRID.chunks))


class Update:
    """What the chain knows of a chunk: this host's gradient, and which parameters it has a part of."""

    def __init__(self, number: int) -> None:
        self.params = frozenset(piece.param for piece in GRID.chunks[number].pieces)
        self.only_slot = torch.zeros(64)
        self.sum = torch.zeros(64)

    def add_slots(self, total: torch.Tensor, touched: Any, *, begins: bool) -> None:
        if begins:
            total.zero_()
        total.add_(self.only_slot)


def value(host: int, step: int, chunk: int) -> float:
    return float(100 * step + 10 * chunk + host)


def steps_of(host: int, network: MemoryNetwork, early: list[list[set[int]]]) -> list[list[float]]:
    """By step: the totals of all chunks. `early`: by step and host, which chunks leave early; where one is missing
    on any host in a step of odd number, all take the chain."""
    links = SocketGroup(network.transport(host), range(HOSTS))
    ranks = [range(one, one + 1) for one in range(HOSTS)]
    chain = HostChain(links, ranks, host, GRID, None, goes_straight=True)
    updates: dict[int, Any] = {number: Update(number) for number in CHUNKS}
    found = []
    for step, sent in enumerate(early):
        for number, update in updates.items():
            update.only_slot.fill_(value(host, step, number))
        for number in sent[host]:
            chain.send_early(number, updates[number])
        touched = None if step % 2 == 0 else "some slot lacks a gradient"
        came = [sorted(number for number in numbers if number % HOSTS != at) for at, numbers in enumerate(sent)]
        assert came[host] == sorted(chain.early)
        chain.send_up(updates.items(), touched, came)
        chain.await_totals()
        found.append([float(chain.total(number)[0]) for number in CHUNKS])
        links.barrier()
    return found


@pytest.mark.timeout(60)
def test_totals_do_not_depend_on_what_left_early() -> None:
    network = MemoryNetwork(HOSTS)
    everything, nothing = set(CHUNKS), set[int]()
    early = [
        [everything, everything, everything],
        [everything, {1, 2, 4}, nothing],
        [{0, 5}, nothing, {3}],
        [everything, everything, everything],
        [nothing, everything, {2}],
    ]
    with ThreadPoolExecutor(HOSTS) as pool:
        found = list(pool.map(lambda host: steps_of(host, network, early), range(HOSTS)))
    expected = [[sum(value(host, step, chunk) for host in range(HOSTS)) for chunk in CHUNKS] for step in range(5)]
    assert found == [expected] * HOSTS


def test_a_chunk_leaves_when_all_its_parameters_have_gradients() -> None:
    grid = make_grid([Flat("float32", 4, size) for size in (48, 16, 100)], chunk_bytes=256)
    chunks: dict[int, Any] = {}
    for number, chunk in enumerate(grid.chunks):
        chunks[number] = update = Update(0)
        update.params = frozenset(piece.param for piece in chunk.pieces)
    gone: list[int] = []
    early = EarlyChunks(chunks.items(), lambda number, update: gone.append(number))
    for _ in range(2):  # in every pass anew
        gone.clear()
        early.begin()
        before: set[int] = set()
        for param in (2, 1, 0):
            early.on_taken(param)
            before.add(param)
            assert set(gone) == {number for number, update in chunks.items() if update.params <= before}
        assert sorted(gone) == sorted(chunks) and gone != sorted(gone)
