"""Who agrees with whom."""

from __future__ import annotations

import pytest

from shoal.strategies.average.gossip import neighbours


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("form", ["ring", "pairs"])
def test_whoever_is_named_names_back(form: str, size: int) -> None:
    for number in range(2 * size):
        met = [neighbours(form, index, size, number) for index in range(size)]
        for index, peers in enumerate(met):
            assert index not in peers and len(set(peers)) == len(peers)
            assert all(0 <= peer < size and index in met[peer] for peer in peers)


@pytest.mark.parametrize("size", range(2, 10))
def test_each_meets_each(size: int) -> None:
    rounds = size - 1 + size % 2
    met = {index: set[int]() for index in range(size)}
    for number in range(rounds):
        for index in range(size):
            met[index] |= set(neighbours("pairs", index, size, number))
    assert met == {index: set(range(size)) - {index} for index in range(size)}


def test_at_most_one_rests() -> None:
    for size in range(2, 10):
        for number in range(size):
            resting = sum(not neighbours("pairs", index, size, number) for index in range(size))
            assert resting == size % 2
