"""The order of an epoch: a permutation, another one each epoch, the same however it is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ledger import Order
from shoal.ledger.order import mix


def test_every_small_length_is_permuted() -> None:
    for length in range(1, 301):
        assert sorted(Order(length, 3).samples(1, 0, length).tolist()) == list(range(length)), length


@pytest.mark.parametrize("length", [(1 << 15) - 1, 1 << 16, (1 << 16) + 1, 300_007])
def test_so_are_big_ones(length: int) -> None:
    order = Order(length, 8)
    assert np.array_equal(np.sort(order.samples(2, 0, length)), np.arange(length))


@settings(max_examples=40)
@given(st.integers(1, 70_000), st.integers(0, 2**63), st.data())
def test_pieces_are_parts_of_the_whole(length: int, seed: int, data: st.DataObject) -> None:
    whole = Order(length, seed).samples(4, 0, length)
    borders = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    order = Order(length, seed)
    for start, stop in zip([0, *borders], [*borders, length], strict=True):
        assert np.array_equal(order.samples(4, start, stop), whole[start:stop])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(Order(100, seed).samples(epoch, 0, 100)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_reading_another_epoch_in_between_changes_nothing() -> None:
    order = Order(50, 1)
    before = order.samples(0, 0, 50).tolist()
    order.samples(1, 0, 50)
    assert order.samples(0, 0, 50).tolist() == before


def test_every_sample_comes_at_every_place_about_as_often() -> None:
    length, epochs = 10, 4000
    counts = np.zeros((length, length))
    order = Order(length, 5)
    for epoch in range(epochs):
        counts[np.arange(length), order.samples(epoch, 0, length)] += 1
    # Each cell is expected 400 times with a deviation of 19; six of those are next to impossible by chance.
    assert np.abs(counts - epochs / length).max() < 6 * 19


def test_neighbours_are_torn_apart() -> None:
    samples = Order(10_000, 0).samples(0, 0, 10_000)
    assert (np.abs(np.diff(samples)) == 1).sum() < 20
    assert abs(np.corrcoef(samples, np.arange(10_000))[0, 1]) < 0.05


def test_without_shuffling_samples_come_as_they_are() -> None:
    assert Order(9, 7, shuffle=False).samples(3, 2, 6).tolist() == [2, 3, 4, 5]


def test_mix_depends_on_every_number_and_its_place() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(12), mix(-1), mix(0)}) == 6
    assert all(0 <= mix(seed, 5) < 1 << 64 for seed in range(100))
