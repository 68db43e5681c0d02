"""The arithmetic of a comparison: what counts of a run, and what several runs say together."""

import math

import pytest

from shoal.bench.laps import BenchRow, Course, Lap, final_loss, rotated, speed
from shoal.errors import LaunchError


def lap(samples_per_s: float, *, first_step_s: float = 0.5, memory: int = 100, loss: float = 1.0) -> Lap:
    return Lap(samples_per_s=samples_per_s, first_step_s=first_step_s, peak_memory={0: memory, 1: 1}, loss=loss)


def row(*speeds: float, strategy: str = "data") -> BenchRow:
    return BenchRow(strategy=strategy, laps=tuple(lap(each) for each in speeds))


@pytest.mark.parametrize(("steps", "warm_up"), [(5, 3), (30, 3), (200, 20)])
def test_the_first_steps_and_the_last_do_not_count(steps, warm_up):
    course = Course(steps)
    assert (course.warm_up, course.total_steps) == (warm_up, warm_up + steps + 5)
    batch = 64
    window = course.window(course.total_steps * batch)
    assert (window.start, window.stop) == (warm_up * batch, (warm_up + steps) * batch)


def test_a_window_follows_the_samples_that_there_really_were():
    course = Course(10)  # 3 + 10 + 5, and every second batch has half as many samples.
    assert course.window(18 * 48) == range(3 * 48, 13 * 48)


def test_a_speed_is_all_samples_over_the_time_of_the_window():
    timeline = [(0.0, 0), (5.0, 100), (6.0, 200), (8.0, 400), (9.0, 500), (99.0, 600)]
    assert speed(timeline, range(100, 500)) == pytest.approx(100)
    assert speed(timeline, range(100, 250)) == pytest.approx(100)
    assert speed(timeline, range(100)) == pytest.approx(20)


@pytest.mark.parametrize("window", [range(110, 190), range(100, 150), range(700, 800)])
def test_a_window_in_which_nothing_can_be_seen_is_an_error(window):
    with pytest.raises(LaunchError, match="take more --steps"):
        speed([(0.0, 0), (5.0, 100), (6.0, 200)], window)


def test_a_loss_is_that_of_the_last_steps():
    assert final_loss([9.0, 3.0]) == 3.0
    assert final_loss([9.0] * 18 + [1.0, 3.0]) == 2.0
    assert math.isnan(final_loss([]))


def test_a_row_is_the_median_of_its_rounds():
    found = BenchRow(
        strategy="data",
        laps=(
            lap(100, first_step_s=0.2, memory=5, loss=0.3),
            lap(200, first_step_s=9.0, memory=7, loss=math.nan),
            lap(120, first_step_s=0.4, memory=6, loss=0.5),
        ),
    )
    assert (found.samples_per_s, found.first_step_s, found.peak_memory) == (120, 0.4, 6)
    assert found.spread == pytest.approx(100 / 120) and found.loss == pytest.approx(0.4)
    assert row(100).spread is None
    assert math.isnan(BenchRow(strategy="data", laps=(lap(1, loss=math.nan),)).loss)


def test_rows_compare_round_by_round():
    assert row(200, 100, 180).ratio_to(row(100, 50, 100)) == 2.0
    assert row(200, 90).ratio_to(row(100)) == 2.0, "the round that only one of them has does not count"


def test_every_round_starts_with_another_one():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
