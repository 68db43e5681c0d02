"""Sums between hosts: chunks that leave early come to the same, or are dropped by all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from shoal.arena.grid import Flat, make_grid
from shoal.comm.group import SocketGroup
from shoal.comm.memory_transport import MemoryNetwork
from shoal.errors import TaskError
from shoal.strategies.data.chain import HostChain
from shoal.strategies.data.early import EarlyChunks

HOSTS = 3
GRID = make_grid([Flat("float32", 4, 64) for _ in range(6)], chunk_bytes=256)
CHUNKS = range(len(GRID.chunks))


class Update:
    """What the chain knows of a chunk: gradients of this host's slots, and of which parameters it has a part."""

    def __init__(self, number: int, slots: int) -> None:
        self.params = frozenset(piece.param for piece in GRID.chunks[number].pieces)
        self.slots = [torch.zeros(64) for _ in range(slots)]
        self.sum = torch.zeros(64)

    @property
    def only_slot(self) -> torch.Tensor:
        (slot,) = self.slots
        return slot

    def add_slots(self, total: torch.Tensor, touched: Any, *, begins: bool) -> None:
        if begins:
            total.zero_()
        for slot in self.slots:
            total.add_(slot)


def value(host: int, slot: int, step: int, chunk: int) -> float:
    return 1e8 * (host == 1) + float(100 * step + 10 * chunk + 3 * host + slot)  # so that the order shows


def steps_of(
    host: int, network: MemoryNetwork, slots: Sequence[int], early: list[list[set[int]]], meets: Barrier
) -> list[list[float]]:
    """By step: the totals of all chunks. `early`: by step and host, which chunks leave early if they can; in steps
    of odd number all begin anew after that."""
    links = SocketGroup(network.transport(host), range(HOSTS))
    ranks = [range(one, one + 1) for one in range(HOSTS)]
    chain = HostChain(links, ranks, host, GRID, None, goes_straight=all(count == 1 for count in slots))
    updates: dict[int, Any] = {number: Update(number, slots[host]) for number in CHUNKS}
    came: list[list[int]] = [[] for _ in slots]
    found = []
    for step, sent in enumerate(early):
        for number, update in updates.items():
            for slot, gradient in enumerate(update.slots):
                gradient.fill_(value(host, slot, step, number))
        for turn in range(HOSTS):  # so that what one has sent has come when the next looks
            if turn == host:
                awaited = GONE[step, host - 1] if host and max(slots) > 1 else []
                while not all(links.has_come(host - 1, 2 * number) for number in awaited):
                    links.pump()
                came[host] = [number for number in sent[host] if chain.leave_early(number, updates[number])]
                GONE[step, host] = came[host]
            meets.wait()
        touched = None if step % 2 == 0 else "some slot lacks a gradient"
        chain.send_up(updates.items(), touched, [GONE[step, one] for one in range(HOSTS)])
        chain.await_totals()
        found.append([float(chain.total(number)[0]) for number in CHUNKS])
        links.barrier()
    return found


GONE: dict[tuple[int, int], list[int]] = {}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [(1, 1, 1), (2, 1, 3), (2, 0, 2)])
def test_totals_do_not_depend_on_what_left_early(slots: tuple[int, ...]) -> None:
    network, meets = MemoryNetwork(HOSTS), Barrier(HOSTS)
    everything, nothing = set(CHUNKS), set[int]()
    early = [
        [everything, everything, everything],
        [everything, {1, 2, 4}, nothing],
        [{0, 5}, nothing, {3}],
        [everything, everything, everything],
        [nothing, everything, {2}],
        [everything, everything, {1, 2}],
        [everything, {0, 3}, everything],
    ]
    GONE.clear()
    with ThreadPoolExecutor(HOSTS) as pool:
        found = list(pool.map(lambda host: steps_of(host, network, slots, early, meets), range(HOSTS)))
    expected = []
    for step in range(len(early)):
        totals = [torch.zeros(1) for _ in CHUNKS]
        for number, total in enumerate(totals):
            for host, count in enumerate(slots):
                for slot in range(count):
                    total.add_(value(host, slot, step, number))
        expected.append([float(total) for total in totals])
    assert found == [expected] * HOSTS
    is_chain = max(slots) > 1
    assert {host for (step, host), gone in GONE.items() if gone} == set(range(HOSTS))
    assert (GONE[4, 1] == []) == is_chain, "what comes before has not come"
    assert set(GONE[6, 2]) == ({0, 3} if is_chain else everything)


def test_a_chunk_leaves_when_all_slots_have_made_all_of_its_gradients() -> None:
    grid = make_grid([Flat("float32", 4, size) for size in (48, 16, 100)], chunk_bytes=256)
    params = [{piece.param for piece in chunk.pieces} for chunk in grid.chunks]
    table = np.zeros((5, len(params)), dtype=np.int32)
    owned: dict[int, Any] = dict.fromkeys(range(len(params)))
    may_leave = owned.keys() - {0}
    gone: list[int] = []
    full = {len(params) - 1}

    def leave(number: int, update: object) -> bool:
        if number in full:
            full.clear()
            return False
        gone.append(number)
        return True

    early = EarlyChunks(grid, table, [0, 1], owned, leave, lambda: None)
    for step in (1, 2):  # in every step anew
        gone.clear()
        for slot in (0, 1):
            assert not gone
            early.begin(step, slot, may_leave=True)
            before: set[int] = set()
            for param in (2, 1, 0):
                full_before = set(full)
                early.on_taken(param)
                before.add(param)
                if slot:
                    made = {number for number in may_leave if params[number] <= before}
                    assert set(gone) == made - full_before, "one that cannot leave is tried again"
        assert sorted(gone) == sorted(may_leave) and (step == 1 or gone == sorted(gone, reverse=True))
        assert early.left(step).tolist() == [number in may_leave for number in owned]
    early.note(step, [2, 3], np.array([1, 0] * len(params), dtype=np.uint8)[: len(params)])
    assert early.noted(step, [2, 3]) == set(range(0, len(params), 2)) and not early.noted(step + 1, [2])
    assert not early.noted(step, [])
    early.forget()
    assert not table.any()


def test_gradients_that_come_in_parts_stay() -> None:
    grid = make_grid([Flat("float32", 4, 64) for _ in range(4)], chunk_bytes=256)
    gone: list[int] = []

    def leave(number: int, update: object) -> bool:
        gone.append(number)
        return True

    table = np.zeros((2, 4), dtype=np.int32)
    owned: dict[int, Any] = dict.fromkeys(range(4))
    early = EarlyChunks(grid, table, [0], owned, leave, lambda: None)
    for step, expected in ((1, []), (2, [3, 1])):  # the first shows what comes in parts
        early.begin(step, 0, may_leave=step > 1)
        for param in (3, 2, 1, 2, 0):
            early.on_taken(param)
        assert gone == expected
    early.begin(3, 0, may_leave=True)
    early.on_taken(3)
    with pytest.raises(TaskError, match="via=ring"):
        early.on_taken(3)
