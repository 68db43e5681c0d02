"""Sizes of the parts of a batch: they add up, follow speed without swinging, and stay while they are good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.ledger import Order, Schedule, even_sizes, sizes_by_speed
from shoal.ledger.shares import TOLERANCE, best_sizes, scaled_sizes

COUNTS = st.integers(1, 400)
SECONDS = st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=9)


def slowest(sizes: tuple[int, ...], seconds: list[float]) -> float:
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


@given(COUNTS, st.integers(1, 9))
def test_even_sizes_differ_by_one_at_most(count: int, slots: int) -> None:
    sizes = even_sizes(count, slots)
    assert sum(sizes) == count and len(sizes) == slots and max(sizes) - min(sizes) <= 1


@given(COUNTS, st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda shares: sum(shares) > 0))
def test_scaled_sizes_keep_the_proportions(count: int, shares: list[float]) -> None:
    sizes = scaled_sizes(count, shares)
    assert sum(sizes) == count
    assert min(sizes) >= (1 if count >= len(shares) else 0)
    if min(count * share / sum(shares) for share in shares) >= 1:
        assert all(abs(n - count * share / sum(shares)) < 1 for n, share in zip(sizes, shares, strict=True))


@given(COUNTS, SECONDS)
def test_no_single_move_makes_the_best_sizes_better(count: int, seconds: list[float]) -> None:
    best = best_sizes(count, seconds)
    assert sum(best) == count and min(best) >= (1 if count >= len(seconds) else 0)
    least = 1 if count >= len(seconds) else 0
    for giver in range(len(seconds)):
        for taker in range(len(seconds)):
            if giver != taker and best[giver] > least:
                moved = [n - (i == giver) + (i == taker) for i, n in enumerate(best)]
                assert slowest(tuple(moved), seconds) >= slowest(best, seconds) * (1 - 1e-12)


@given(COUNTS, SECONDS, st.data())
def test_sizes_come_to_rest_and_are_good_then(count: int, seconds: list[float], data: st.DataObject) -> None:
    slots = len(seconds)
    sizes = scaled_sizes(count, data.draw(st.lists(st.integers(1, 50), min_size=slots, max_size=slots)))
    seen = [slowest(sizes, seconds)]
    for _ in range(40):
        after = sizes_by_speed(count, seconds, sizes)
        assert sum(after) == count and min(after) >= (1 if count >= slots else 0)
        if after == sizes:
            break
        sizes = after
        seen.append(slowest(sizes, seconds))
    else:
        raise AssertionError(f"still moving after 40 rounds: {sizes}")
    assert seen == sorted(seen, reverse=True), "every change makes the step shorter"
    assert seen[-1] <= (1 + TOLERANCE) * slowest(best_sizes(count, seconds), seconds)


@given(st.integers(100, 1000), st.floats(0.98, 1.02), st.floats(0.98, 1.02))
def test_small_differences_change_nothing(count: int, first: float, second: float) -> None:
    sizes = even_sizes(count, 2)
    assert sizes_by_speed(count, [0.01 * first, 0.01 * second], sizes) == sizes


def test_a_worker_three_times_slower_gets_a_third() -> None:
    first = sizes_by_speed(128, [0.03, 0.01], (64, 64))
    assert first == (48, 80), "half of the way at a time"
    sizes = first
    for _ in range(10):
        sizes = sizes_by_speed(128, [0.03, 0.01], sizes)
    assert slowest(sizes, [0.03, 0.01]) <= 1.05 * 0.96


@pytest.mark.parametrize("unknown", [0.0, float("nan"), float("inf")])
def test_without_a_measurement_sizes_stay(unknown: float) -> None:
    assert sizes_by_speed(10, [unknown, 0.1], (2, 8)) == (2, 8)
    assert sizes_by_speed(5, [unknown, 0.1], (2, 8)) == (1, 4)


def test_cuts_follow_the_sizes_and_a_small_batch_their_proportions() -> None:
    schedule = Schedule(20, 8, 3, 1, None, Order(20, 1))
    batch = schedule.order.samples(0, 0, 8).tolist()
    cuts = list(schedule.cuts(1, range(3), (1, 5, 2)))
    assert [cut.samples.tolist() for cut in cuts] == [batch[:1], batch[1:6], batch[6:]]
    assert [cut.samples.tolist() for cut in schedule.cuts(1, range(1, 2), (1, 5, 2))] == [batch[1:6]]
    assert [len(cut.samples) for cut in schedule.cuts(3, range(3), (1, 5, 2))] == [1, 2, 1]
    assert {cut.batch_samples for cut in cuts} == {8}
    assert [cut.samples.tolist() for cut in schedule.cuts(2, range(3), even_sizes(8, 3))] == [
        cut.samples.tolist() for cut in schedule.cuts(2, range(3))
    ]


@pytest.mark.parametrize("sizes", [(8,), (9, -1), (0, 0)])
def test_sizes_that_cannot_be(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="2 slots"):
        list(Schedule(16, 8, 2, 1, None, Order(16, 1)).cuts(1, range(2), sizes))
