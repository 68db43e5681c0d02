"""Differences at a plain server: merged once, by age, clipped, and nothing of what cannot be."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.errors import SpecError
from shoal.ps import Merging
from shoal.ps.plain.table import ParameterTable


def table(**merging: float) -> ParameterTable:
    return ParameterTable({"w": torch.zeros(2), "b": torch.zeros(1)}, None, Merging(**merging))


def difference(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value), "b": torch.full((1,), value)}


def values(of: ParameterTable) -> list[float]:
    return [float(each.flatten()[0]) for each in of.copies()[1].values()]


def test_so_many_make_a_version_and_the_old_count_less() -> None:
    one = table(buffer=2, rate=0.5, oldest=3)
    assert [one.merge(difference(2.0), 0), one.merge(difference(4.0), 0)] == [0, 1]
    assert values(one) == [1.5, 1.5]
    one.merge(difference(1.0), 1)
    assert one.merge(difference(1.0), 0) == 2
    assert values(one) == pytest.approx([1.5 + 0.5 * (1 + 2**-0.5) / 2] * 2)


def test_the_oldest_are_left_out_and_the_long_made_shorter() -> None:
    one = table(oldest=1, clip=math.sqrt(3.0))
    for since in (0, 1):
        one.merge(difference(5.0), since)
    assert values(one) == pytest.approx([2.0, 2.0])
    assert one.merge(difference(1.0), 0) == 2, "it is two versions old"
    assert values(one) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("sent", "since", "why"),
    [
        ({"w": torch.zeros(2)}, 0, "'b' is missing"),
        (difference(math.nan), 0, "no numbers"),
        (difference(math.inf), 0, "no numbers"),
        (difference(1.0), 1, "is to come"),
    ],
)
def test_what_cannot_be_merged_changes_nothing(sent: dict[str, torch.Tensor], since: int, why: str) -> None:
    one = table(buffer=2)
    one.merge(difference(1.0), 0)
    with pytest.raises(SpecError, match=why):
        one.merge(sent, since)
    one.merge(difference(1.0), 0)
    assert values(one) == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"buffer": 0}, {"oldest": -1}, {"clip": 0.0}, {"rate": math.nan}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="Merging"):
        Merging(**wrong)
