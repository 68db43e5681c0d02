"""Samplers as functions of seed and epoch: weights, classes, the user's own, and streams."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.datasets import Stream
from shoal.errors import SpecError, TaskError
from shoal.ledger import EpochOrder, Schedule, make_order
from shoal.spec import Stratified, Task, Weighted


def order_of(length: int, *, batch_size: int = 8, train: Any = None, **fields: Any) -> EpochOrder:
    train = list(range(length)) if train is None else train
    task = Task(model=lambda: None, optimizer=lambda p: None, loss=lambda a, b: a, train=train, **fields)
    return make_order(task, train, batch_size)


def epoch(order: EpochOrder, number: int = 0) -> list[int]:
    return order.samples(number, 0, order.length).tolist()


def test_weights_decide_how_often_a_sample_is_drawn() -> None:
    order = order_of(4, sampler=Weighted([0.0, 1.0, 2.0, 5.0], num_samples=40_000))
    counts = Counter(epoch(order))
    assert order.length == 40_000 and counts[0] == 0
    # Of 40000 draws the standard deviation is below 100.
    assert [abs(counts[n] - 5000 * weight) < 500 for n, weight in ((1, 1), (2, 2), (3, 5))] == [True] * 3


@given(st.lists(st.floats(0, 9), min_size=1, max_size=30).filter(any), st.integers(0, 9), st.data())
def test_any_part_of_a_weighted_epoch_is_the_same_to_everybody(
    weights: list[float], seed: int, data: st.DataObject
) -> None:
    sampler = Weighted(weights, num_samples=100)
    whole = epoch(order_of(len(weights), seed=seed, sampler=sampler), 3)
    start = data.draw(st.integers(0, 100))
    stop = data.draw(st.integers(start, 100))
    part = order_of(len(weights), seed=seed, sampler=sampler).samples(3, start, stop)
    assert part.tolist() == whole[start:stop]
    assert all(weights[sample] > 0 for sample in whole)


def test_without_replacement_heavy_samples_come_first_and_none_twice() -> None:
    weights = [1.0] * 50 + [0.0] * 10 + [100.0] * 50
    order = order_of(110, sampler=Weighted(weights, replacement=False))
    found = epoch(order)
    assert sorted(found) == [*range(50), *range(60, 110)]
    assert sum(sample >= 60 for sample in found[:50]) > 40
    short = order_of(110, sampler=Weighted(weights, replacement=False, num_samples=30))
    assert short.length == len(set(epoch(short))) == 30


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 40), st.integers(0, 50))
def test_every_batch_has_the_classes_in_their_proportions(labels: list[int], batch_size: int, seed: int) -> None:
    order = order_of(len(labels), batch_size=batch_size, seed=seed, sampler=Stratified(labels))
    found = epoch(order, 2)
    assert sorted(found) == list(range(len(labels)))
    totals = Counter(labels)
    full = len(labels) // batch_size
    bound = 1 + 1 / max(1, full)
    for start in range(0, len(labels), batch_size):
        batch = found[start : start + batch_size]
        here = Counter(labels[sample] for sample in batch)
        for name, total in totals.items():
            assert abs(here[name] - len(batch) * total / len(labels)) < bound


def test_full_batches_differ_by_one_sample_of_a_class_at_most() -> None:
    labels = ["rare"] * 10 + ["usual"] * 54
    found = epoch(order_of(64, sampler=Stratified(labels)))
    rare = [sum(labels[sample] == "rare" for sample in found[start : start + 8]) for start in range(0, 64, 8)]
    assert sorted(rare) == [1] * 6 + [2] * 2


@pytest.mark.parametrize(
    "sampler",
    [
        Weighted(np.arange(1, 41)),
        Weighted(np.arange(1, 41), replacement=False),
        Stratified(np.arange(40) % 3),
        lambda epoch, seed: np.random.Generator(np.random.PCG64([epoch, seed])).permutation(40),
    ],
    ids=["weighted", "once", "stratified", "own"],
)
def test_seeds_and_epochs_give_different_orders_and_the_same_ones_the_same(sampler: Any) -> None:
    orders = {
        tuple(epoch(order_of(40, seed=seed, sampler=sampler), number)) for seed in range(3) for number in range(3)
    }
    assert len(orders) == 9
    order = order_of(40, seed=1, sampler=sampler)
    back_and_forth = [epoch(order, number) for number in (0, 1, 0)]
    assert back_and_forth[0] == back_and_forth[2] != back_and_forth[1]


class Halves:
    """An order of one's own: even samples in even epochs, odd ones in the others."""

    def order(self, epoch: int) -> range:
        return range(epoch % 2, 10, 2)


def test_an_epoch_may_be_shorter_than_the_set() -> None:
    order = order_of(10, sampler=Halves())
    assert order.length == 5 and epoch(order, 3) == [1, 3, 5, 7, 9]
    schedule = Schedule(order.length, 2, 1, 4, None, order)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (3, 12)
    assert schedule.samples_after(12) == 20, "positions are counted, not samples"


@pytest.mark.parametrize(
    ("sampler", "error"),
    [
        (lambda epoch, seed: [0, 10], "from 0 to 10"),
        (lambda epoch, seed: [-1, 2], "from -1 to 2"),
        (lambda epoch, seed: [], "list of sample numbers"),
        (lambda epoch, seed: [0.5], "list of sample numbers"),
        (lambda epoch, seed: np.random.permutation(10), "two different orders"),
        (lambda epoch, seed: range(3 + epoch), "3 samples for epoch 0 and 4 for epoch 1"),
    ],
)
def test_orders_of_ones_own_are_checked(sampler: Any, error: str) -> None:
    with pytest.raises(TaskError, match=error):
        epoch(order_of(10, sampler=sampler), 1)


def test_samplers_that_do_not_fit() -> None:
    with pytest.raises(TaskError, match="3 weights, but the train set has 4"):
        order_of(4, sampler=Weighted([1, 2, 3]))
    with pytest.raises(TaskError, match="2 labels, but the train set has 4"):
        order_of(4, sampler=Stratified(["a", "b"]))
    with pytest.raises(TaskError, match="forward only"):
        order_of(4, sampler=Weighted([1] * 4), train=Stream(["s"], lambda shard: range(4), [4]))
    with pytest.raises(SpecError, match="one of them"):
        order_of(4, sampler=Weighted([1] * 4), shuffle=False)
    with pytest.raises(SpecError, match="found int"):
        order_of(4, sampler=3)
    for weights in ([], [0, 0], [-1, 2], [float("nan")], [[1]]):
        with pytest.raises(SpecError, match="Weighted: weights"):
            Weighted(weights)
    with pytest.raises(SpecError, match="only 2 samples"):
        Weighted([1, 0, 3], replacement=False, num_samples=3)
    with pytest.raises(SpecError, match="Stratified: labels"):
        Stratified([0.5, 1.5])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 9), st.data())
def test_a_stream_is_taken_shard_by_shard_and_block_by_block(
    lengths: list[int], buffer: int, seed: int, data: st.DataObject
) -> None:
    stream = Stream(range(len(lengths)), lambda shard: range(lengths[shard]), lengths, buffer=buffer)
    order = order_of(0, train=stream, seed=seed)
    found = epoch(order, 2)
    assert sorted(found) == list(range(sum(lengths)))
    start = data.draw(st.integers(0, len(found)))
    stop = data.draw(st.integers(start, len(found)))
    assert order.samples(2, start, stop).tolist() == found[start:stop]
    blocks = [(shard, offset // buffer) for shard, length in enumerate(lengths) for offset in range(length)]
    visited = [blocks[sample] for sample in found]
    changes = [now for before, now in pairwise([None, *visited]) if now != before]
    assert len(changes) == len(set(changes)), "no block is left and come back to"
    assert all(b == (a[0], a[1] + 1) or b[1] == 0 for a, b in pairwise(changes))
    assert epoch(order_of(0, train=stream, shuffle=False)) == list(range(sum(lengths)))
