"""One suite for every order of an epoch: two names, `length` and `samples`, which follow from seed and epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.datasets import Stream
from shoal.datasets.iterated import Iterated
from shoal.ledger import EpochOrder, make_order
from shoal.ledger.clients import ClientOrder, split_evenly
from shoal.spec import Stratified, Task, Weighted
from shoal.spec.clients import ClientRounds

COUNT = 90
LENGTHS = (30, 20, 40)


def permuted(epoch: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([epoch, seed])).permutation(COUNT)


ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "as they lie": {"shuffle": False},
    "weighted": {"sampler": Weighted(np.arange(1, COUNT + 1), num_samples=70)},
    "weighted, once": {"sampler": Weighted(np.arange(1, COUNT + 1), replacement=False, num_samples=60)},
    "stratified": {"sampler": Stratified(np.arange(COUNT) % 4)},
    "the user's own": {"sampler": permuted},
    "passes": {"train": lambda: Iterated(range(COUNT), seed=0, keep=1)},
    "clients": {},
    "stream": {"train": lambda: Stream(range(3), lambda shard: range(LENGTHS[shard]), LENGTHS, buffer=16)},
}
SAME_IN_EVERY_EPOCH = {"as they lie"}
SAME_FOR_EVERY_SEED = {"as they lie", "passes"}
NUMBERED_ON = {"passes"}
"""Samples of a later epoch are others, and have other numbers."""
REPEATS = {"weighted", "clients"}


def make(name: str, seed: int = 3) -> EpochOrder:
    if name == "clients":
        rounds = ClientRounds.of(count=9, share=0.5, partition="own", every=2, workers=2)
        return ClientOrder(split_evenly(COUNT, 9, seed), rounds, batch_size=8, slots=2, seed=seed)
    fields = dict(ORDERS[name])
    train = fields.pop("train", lambda: list(range(COUNT)))()
    task = Task(
        model=lambda: None, optimizer=lambda p: None, loss=lambda a, b: a, train=train, seed=seed, **fields
    )
    return make_order(task, train, 8)


def whole(order: EpochOrder, epoch: int) -> list[int]:
    return order.samples(epoch, 0, order.length).tolist()


@pytest.mark.parametrize("name", ORDERS)
def test_an_epoch_is_made_of_samples_of_the_set(name: str) -> None:
    order = make(name)
    found = whole(order, 1)
    first = COUNT if name in NUMBERED_ON else 0
    assert len(found) == order.length and set(found) <= set(range(first, first + COUNT))
    assert name in REPEATS or len(set(found)) == len(found)
    assert order.samples(1, 5, 5).tolist() == []


@pytest.mark.parametrize("name", ORDERS)
def test_seed_and_epoch_decide_it_and_nothing_else(name: str) -> None:
    """Whoever computes it: one that joins late, or goes back and forth."""
    order = make(name)
    epochs = [whole(order, epoch) for epoch in (0, 1, 2, 0)]
    assert epochs[0] == epochs[3] == whole(make(name), 0)
    assert (epochs[0] == epochs[1]) == (name in SAME_IN_EVERY_EPOCH)
    assert (whole(make(name, seed=4), 0) == epochs[0]) == (name in SAME_FOR_EVERY_SEED)


@pytest.mark.parametrize("name", ORDERS)
@given(cut=st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)))
def test_any_part_of_it_is_that_of_the_whole(name: str, cut: tuple[int, int]) -> None:
    order = make(name)
    start, stop = sorted(min(at, order.length) for at in cut)
    assert order.samples(2, start, stop).tolist() == whole(make(name), 2)[start:stop]
