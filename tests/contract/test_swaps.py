"""One suite for every way in which slots bring each other tensors, in real processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from helpers.forked import in_processes
from shoal.arena import Segment
from shoal.model.gathering import Question
from shoal.spec import Cluster, World, parse_strategy
from shoal.spec.conduct import even_fills
from shoal.step.passes import Brought, LocalSwap, Swap
from shoal.strategies.base import Setting
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.rooms import RoomSwap
from shoal.strategies.groups.summed import SummedSwap

SLOTS = 3
STEPS = 3


def local(world: World) -> Swap:
    return LocalSwap(SLOTS)


def rooms(world: World) -> Swap:
    segment = Segment(world.arena_fd)
    segment.reserve("something", 100)
    segment.add_rooms(SLOTS)
    segment.map()
    return RoomSwap(segment, SLOTS, None)


def summed(world: World) -> Swap:
    conduct = parse_strategy("sharded").conduct(Cluster(workers=world.world_size))
    return SummedSwap(SLOTS, open_group("auto", Setting(world=world, conduct=conduct)).all_reduce_)


WAYS = [(local, 1), (rooms, 1), (rooms, 2), (rooms, 3), (summed, 1), (summed, 2), (summed, 3)]
Work = Callable[[Swap, range, Callable[[], Any]], Any]
"""Given a swap, the slots of this process, and how to wait for the others."""
GUARD_S = 30


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0].__name__} x{way[1]}")
def run(request: pytest.FixtureRequest) -> Callable[[Work], list[Any]]:
    """What a function returns in each process, given its swap and slots."""
    make, size = request.param

    def of(work: Work) -> list[Any]:
        fills, barrier = even_fills(SLOTS, size), get_context("fork").Barrier(size)
        return in_processes(
            size, lambda world: work(make(world), fills[world.global_rank], lambda: barrier.wait(GUARD_S))
        )

    return of


def rows_of(step: int, slot: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other values and another number of rows for each; some are empty."""
    return (torch.arange(2 * slot * step).view(-1, 2) - 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_all_have_what_each_has_brought(run: Callable[[Work], list[Any]], dtype: torch.dtype) -> None:
    def work(swap: Swap, slots: range, meet: Callable[[], Any]) -> list[Any]:
        found = []
        for step in range(1, STEPS + 1):
            swap.begin(step, slots)
            for question in (Question.ROWS, Question.GRADIENTS):
                brought = {slot: Brought(question, rows_of(step, slot, dtype)) for slot in slots}
                for each in swap.swap(brought):
                    assert each is not None and each.question is question and each.values.dtype == dtype
                    found.append(each.values.float().tolist())
            for slot in slots:
                swap.left(slot)
            assert not swap.end()
            meet()  # as at the end of every step
        return found

    expected = [
        rows_of(step, slot, dtype).float().tolist()
        for step in range(1, STEPS + 1)
        for _ in range(2)
        for slot in range(SLOTS)
    ]
    assert all(found == expected for found in run(work))


def test_every_bit_comes_through(run: Callable[[Work], list[Any]]) -> None:
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-42], dtype=torch.float32)

    def work(swap: Swap, slots: range, meet: Callable[[], Any]) -> list[bool]:
        swap.begin(1, slots)
        found = swap.swap({slot: Brought(Question.ROWS, odd) for slot in slots})
        return [torch.equal(each.values.view(torch.int32), odd.view(torch.int32)) for each in found if each]

    assert all(found == [True] * SLOTS for found in run(work))


def test_who_has_ended_is_not_waited_for(run: Callable[[Work], list[Any]]) -> None:
    """Slot 1 brings something once, and the others twice."""

    def work(swap: Swap, slots: range, meet: Callable[[], Any]) -> list[Any]:
        swap.begin(1, slots)
        rows = {slot: Brought(Question.ROWS, torch.zeros(1)) for slot in slots}
        swap.swap(rows)
        if 1 in slots:
            swap.left(1)
        if more := {slot: own for slot, own in rows.items() if slot != 1}:
            return [each is None for each in swap.swap(more)]
        swap.end()
        return [False, True, False]

    assert all(found == [False, True, False] for found in run(work))


def test_sums_need_no_looks(run: Callable[[Work], list[Any]]) -> None:
    def work(swap: Swap, slots: range, meet: Callable[[], Any]) -> list[Any]:
        swap.begin(1, slots)
        own = {slot: Brought(Question.SUMS, torch.full((2,), float(slot), dtype=torch.float64)) for slot in slots}
        return [each.values.tolist() for each in swap.swap(own) if each is not None]

    assert all(found == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] for found in run(work))


def test_a_successor_finds_what_was_brought_before() -> None:
    """It makes the passes of a slot again while the others are ahead, and nobody notices."""
    segment = Segment()
    segment.add_rooms(2)
    segment.map()
    first, second = (RoomSwap(segment, 2, None) for _ in range(2))
    values = [torch.full((1,), float(number)) for number in range(4)]
    for step in (1, 2):
        first.begin(step, [0])
        second.begin(step, [1])
        # Both come to the first meeting; the second slot's process dies on its way to the next.
        _bring(first, second, values[0], values[1])
        successor = RoomSwap(segment, 2, None)
        successor.begin(step, [1])
        again = successor.swap({1: Brought(Question.ROWS, values[1])})
        assert [float(each.values) for each in again if each is not None] == [0.0, 1.0]
        _bring(first, successor, values[2], values[3])
        second = successor


def _bring(first: RoomSwap, second: RoomSwap, left: torch.Tensor, right: torch.Tensor) -> None:
    """Two processes meet, here as threads."""
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(swap.swap, {slot: Brought(Question.ROWS, values)})
            for slot, (swap, values) in enumerate(((first, left), (second, right)))
        ]
        for wait in waits:
            found = [float(each.values) for each in wait.result(30) if each is not None]
            assert found == [float(left), float(right)]
