"""When results over seeds are as good, worse, or cannot be told apart."""

from __future__ import annotations

import pytest

from shoal.verification import Verdict
from shoal.verification.noise import SeedContest, contests


def contest(name: str, ours: list[float], reference: list[float]) -> SeedContest:
    return contests([{name: value} for value in ours], [{name: value} for value in reference])[0]


@pytest.mark.parametrize(
    ("name", "ours", "reference", "verdict", "words"),
    [
        ("accuracy", [0.941, 0.951], [0.95, 0.96], Verdict.EQUAL, "within 1 point"),
        ("accuracy", [0.93, 0.94], [0.95, 0.96], Verdict.MISMATCH, "worse by 2 points"),
        ("accuracy", [0.98, 0.99], [0.95, 0.96], Verdict.EQUAL, "better by 3 points"),
        # The same mean difference of 2 points, but of seeds that scatter by more than that.
        ("accuracy", [0.91, 0.96], [0.95, 0.96], Verdict.EQUAL, "worse by 2 points, within noise"),
        # However unsure, this much is worse.
        ("accuracy", [0.80, 0.96], [0.95, 0.96], Verdict.MISMATCH, "worse by 7.5 points"),
        ("test loss", [1.015, 2.03], [1.0, 2.0], Verdict.EQUAL, "within 2%"),
        ("test loss", [1.1, 2.1], [1.0, 2.0], Verdict.MISMATCH, "worse by 6.7%"),
        ("train loss", [0.9], [1.0], Verdict.EQUAL, "better by 10%"),
    ],
)
def test_verdicts(name: str, ours: list[float], reference: list[float], verdict: Verdict, words: str) -> None:
    found = contest(name, ours, reference)

    assert (found.verdict, found.words) == (verdict, words)


def test_a_share_is_judged_in_place_of_the_loss() -> None:
    ours = [{"test loss": 9.0, "accuracy": 0.5, "perplexity": 40.0}]
    loss, accuracy, perplexity = contests(ours, [{"test loss": 1.0, "accuracy": 0.5, "perplexity": 2.0}])

    assert accuracy.verdict is Verdict.EQUAL
    assert loss.verdict is perplexity.verdict is Verdict.NOT_JUDGED


def test_an_error_should_fall() -> None:
    found = contest("mean_absolute_error", [0.5, 0.5], [0.1, 0.1])

    assert found.worse_by == pytest.approx(0.4) and found.verdict is Verdict.MISMATCH


def test_spread() -> None:
    spread = contest("accuracy", [0.5, 0.7], [0.5, 0.5]).ours

    assert (spread.low, spread.high) == (0.5, 0.7)
    assert spread.mean == pytest.approx(0.6) and spread.deviation == pytest.approx(0.1414, abs=1e-4)
