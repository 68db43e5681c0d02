"""The split of a chain is the best there is."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.layout.stage_split import split_chain

chains = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8)


def most_expensive(costs: list[float], counts: tuple[int, ...], crossings: list[float] | None = None) -> float:
    cuts = [0, *accumulate(counts)]
    crossing = [0.0, *(crossings[1:] if crossings else [0.0] * (len(costs) - 1)), 0.0]
    return max(sum(costs[first:stop]) + crossing[first] + crossing[stop] for first, stop in pairwise(cuts))


def all_splits(count: int, stages: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, count), stages - 1)
    return [tuple(stop - first for first, stop in pairwise((0, *cuts, count))) for cuts in inner]


@given(chains, st.integers(1, 8), st.data())
def test_no_other_split_is_better(costs: list[float], stages: int, data: st.DataObject) -> None:
    stages = min(stages, len(costs))
    crossings = data.draw(st.lists(st.floats(0.0, 50.0), min_size=len(costs), max_size=len(costs)))
    found = split_chain(costs, stages, crossings)
    assert sum(found) == len(costs)
    assert len(found) == stages
    assert min(found) >= 1
    best = min(most_expensive(costs, other, crossings) for other in all_splits(len(costs), stages))
    assert most_expensive(costs, found, crossings) == pytest.approx(best)


def test_the_middle_of_equal_costs() -> None:
    assert split_chain([1.0] * 12, 4) == (3, 3, 3, 3)


def test_a_forbidden_cut_is_avoided() -> None:
    never = float("inf")
    assert split_chain([1.0, 1.0, 1.0, 1.0], 2, [0.0, 0.0, never, 0.0]) in ((1, 3), (3, 1))
    with pytest.raises(SpecError, match="cannot be cut into 2 stages"):
        split_chain([1.0, 1.0], 2, [0.0, never])


def test_more_stages_than_layers() -> None:
    with pytest.raises(SpecError, match=r"4 stages were asked for, but the model has 3 layers"):
        split_chain([1.0, 1.0, 1.0], 4)


sizes_of_links = st.lists(st.integers(0, 100), min_size=8, max_size=8)


@given(chains, st.integers(1, 4), sizes_of_links, st.integers(0, 400), st.sampled_from([0.0, 0.1]))
def test_no_stage_is_too_large_and_no_better_split_would_fit(
    costs: list[float], stages: int, sizes: list[int], most: int, slack: float
) -> None:
    stages = min(stages, len(costs))

    def size(stage: int, first: int, stop: int) -> float:
        return (stage + 1) * sum(sizes[first:stop])  # earlier stages hold less

    def largest(counts: tuple[int, ...]) -> float:
        cuts = pairwise([0, *accumulate(counts)])
        return max(size(stage, first, stop) for stage, (first, stop) in enumerate(cuts))

    fitting = [split for split in all_splits(len(costs), stages) if largest(split) <= most]
    found = split_chain(costs, stages, fits=lambda *stage: size(*stage) <= most, sizes=size, slack=slack)
    if found is None:
        assert not fitting
        return
    best = min(most_expensive(costs, other) for other in fitting)
    assert found in fitting
    assert most_expensive(costs, found) <= best * (1 + slack) * (1 + 1e-9)
    if slack:
        near = [other for other in fitting if most_expensive(costs, other) <= best * (1 + slack) * (1 - 1e-9)]
        assert all(largest(found) <= largest(other) for other in near)


def test_noise_does_not_move_a_cut() -> None:
    """Costs that differ by two hundredths, in whatever way, give one split: that of the evenest memory."""
    plain = [0.1, *[1.0, 0.05] * 8, 0.1]
    sizes = [1, *[10, 0] * 8, 1]
    dice = random.Random(5)
    noisy = [[cost * dice.uniform(1, 1.02) for cost in plain] for _ in range(50)]
    found = {
        split_chain(costs, 3, sizes=lambda _, first, stop: sum(sizes[first:stop]), slack=0.05) for costs in noisy
    }
    assert len(found) == 1
