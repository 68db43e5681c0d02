"""Epsilon is the library's, close to what an accountant of this file finds, and turned into noise and lengths."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.stats import norm

from shoal.errors import ProtocolError, SpecError
from shoal.privacy import Budget, NoiseRounds, epsilon_of, noise_for, rounds_within
from shoal.spec.privacy import Privacy

DELTA = 1e-5
CASES = [(1.0, 10, 1000, 500), (0.8, 64, 1437, 115), (2.0, 100, 1000, 300)]
"""Noise, chosen, total, rounds."""


def rounds(noise: float, chosen: int, total: int, count: int, sampling: str = "poisson") -> NoiseRounds:
    return NoiseRounds(noise=noise, chosen=chosen, total=total, count=count, sampling=sampling)


def by_fourier(noise: float, rate: float, count: int, delta: float) -> float:
    """Epsilon from the definition: the privacy loss of one round on a grid, of all rounds by Fourier transform,
    and the least epsilon whose hockey-stick divergence is at most delta, in both directions."""
    width, step = 40.0, 2e-4
    grid = np.arange(-round(width / step), round(width / step)) * step

    def cumulative(loss: np.ndarray, *, removes: bool) -> np.ndarray:
        # The mixture q·N(1, σ²) + (1 − q)·N(0, σ²) against N(0, σ²): the loss rises with x, one to one.
        sign = 1 if removes else -1
        inner = (np.exp(np.clip(sign * loss, -700, 700)) - (1 - rate)) / rate
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.where(inner > 0, noise**2 * np.log(np.maximum(inner, 1e-300)) + 0.5, -np.inf)
        if removes:
            return rate * norm.cdf(x, 1, noise) + (1 - rate) * norm.cdf(x, 0, noise)
        return 1 - norm.cdf(x, 0, noise)

    worst = 0.0
    for removes in (True, False):
        edges = cumulative(np.append(grid, grid[-1] + step) - step / 2, removes=removes)
        chance = np.diff(edges)
        spectrum = np.fft.rfft(np.fft.ifftshift(chance))
        composed = np.fft.fftshift(np.fft.irfft(spectrum**count, len(grid)))
        # E[(1 − e^(ε − L))₊] for every ε of the grid, from sums over the tail.
        above = np.cumsum(composed[::-1])[::-1]
        scaled = np.cumsum((composed * np.exp(-grid))[::-1])[::-1]
        divergence = above - np.exp(grid) * scaled
        fitting = np.flatnonzero((divergence > delta) & (grid >= 0))
        worst = max(worst, float(grid[fitting[-1]]) if len(fitting) else 0.0)
    return worst


@pytest.mark.parametrize("case", CASES)
def test_epsilon_is_the_librarys(case: tuple[float, int, int, int]) -> None:
    noise, chosen, total, count = case
    event = dp_accounting.PoissonSampledDpEvent(chosen / total, dp_accounting.GaussianDpEvent(noise))
    accountant = pld.PLDAccountant()
    accountant.compose(event, count)
    assert epsilon_of([rounds(*case)], DELTA) == accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("case", CASES)
def test_epsilon_agrees_with_one_computed_from_the_definition(case: tuple[float, int, int, int]) -> None:
    noise, chosen, total, count = case
    assert epsilon_of([rounds(*case)], DELTA) == pytest.approx(
        by_fourier(noise, chosen / total, count, DELTA), rel=0.02
    )


def test_a_fixed_number_of_clients_is_counted_as_such() -> None:
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(100, 20, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(event, 30)
    # Who differs takes one part away and adds another: twice the clip, so half the noise.
    assert epsilon_of([rounds(4.0, 20, 100, 30, "fixed")], DELTA) == accountant.get_epsilon(DELTA)
    plain = pld.PLDAccountant()
    plain.compose(dp_accounting.GaussianDpEvent(4.0), 30)
    assert epsilon_of([rounds(4.0, 100, 100, 30, "fixed")], DELTA) == plain.get_epsilon(DELTA)


def test_the_noise_that_is_found_is_enough_and_hardly_more() -> None:
    coming = rounds(1.0, 64, 1437, 115)
    noise = noise_for(8.0, DELTA, [], coming)
    assert 7.9 < epsilon_of([rounds(noise, 64, 1437, 115)], DELTA) <= 8.0
    with pytest.raises(SpecError, match="no noise"):
        noise_for(0.1, DELTA, [rounds(1.0, 64, 1437, 115)], coming)


def test_a_run_is_as_long_as_it_can_be_and_not_longer() -> None:
    coming = rounds(1.0, 64, 1437, 500)
    count = rounds_within(4.0, DELTA, [], coming)
    assert 0 < count < 500
    assert epsilon_of([rounds(1.0, 64, 1437, count)], DELTA) <= 4.0
    assert epsilon_of([rounds(1.0, 64, 1437, count + 1)], DELTA) > 4.0


def test_what_was_spent_is_carried_on() -> None:
    privacy = Privacy(epsilon=6.0)
    whole = Budget.plan(privacy, rounds(1.0, 64, 1437, 100), "samples")
    saved = whole.plain(40)
    resumed = Budget.plan(privacy, rounds(1.0, 64, 1437, 60), "samples", saved)
    assert resumed.coming.noise == whole.coming.noise and not resumed.is_short
    assert resumed.facts(60) == whole.facts(100) and resumed.facts(60)["rounds"] == 100
    longer = Budget.plan(privacy, rounds(1.0, 64, 1437, 80), "samples", saved)
    assert longer.is_short and 60 <= longer.coming.count < 70
    assert longer.facts(longer.coming.count)["epsilon"] <= 6.0
    with pytest.raises(SpecError, match="one more round"):
        Budget.plan(Privacy(epsilon=0.5), rounds(1.0, 64, 1437, 10), "samples", saved)


@pytest.mark.parametrize("saved", [{}, {"noise": 1.0}, {"noise": -1.0, "spent": []}, {"noise": 1, "spent": [{}]}])
def test_a_damaged_budget_is_no_budget(saved: object) -> None:
    with pytest.raises(ProtocolError):
        Budget.plan(Privacy(noise=1.0), rounds(1.0, 64, 1437, 10), "samples", saved)


def test_nothing_is_spent_before_the_first_round() -> None:
    assert epsilon_of([], DELTA) == epsilon_of([rounds(1.0, 1, 10, 0)], DELTA) == 0.0
    assert math.isfinite(Budget.plan(Privacy(noise=1.0), rounds(1.0, 1, 10, 5), "samples").facts(0)["epsilon"])
