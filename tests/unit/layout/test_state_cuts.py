"""Who keeps what: every element has one keeper, and nobody keeps much more than his share."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.layout.state_cuts import CutParameter, StateCut, cut_state
from shoal.spec.model_parallel import POLICIES

members_drawn = st.builds(
    lambda layer, numel: CutParameter(layer=f"layer{layer}", numel=numel),
    st.integers(0, 5),
    st.integers(0, 9) | st.integers(0, 20_000),
)
models = st.lists(st.lists(members_drawn, max_size=8), min_size=1, max_size=6)
few = settings(max_examples=40, deadline=None)
WORKERS = st.integers(1, 5)


def capacities_for(policy: str, workers: int) -> str:
    return "+".join(str(number + 1) for number in range(workers)) if policy == "device" else "even"


def cut(units: list[list[CutParameter]], workers: int, policy: str) -> list[StateCut]:
    return cut_state(units, workers=workers, policy=policy, capacities=capacities_for(policy, workers))


def owners(cut: StateCut, workers: int) -> list[list[int]]:
    """By parameter: the workers that keep any of it."""
    spans = [[cut.span(param, worker) for worker in range(workers)] for param in range(len(cut.numels))]
    return [[worker for worker, (start, stop) in enumerate(row) if start < stop] for row in spans]


@few
@given(models, WORKERS, st.sampled_from(POLICIES))
def test_every_element_has_one_keeper(units: list[list[CutParameter]], workers: int, policy: str) -> None:
    for unit, one in zip(units, cut(units, workers, policy), strict=True):
        for param, member in enumerate(unit):
            spans = sorted(span for worker in range(workers) if (span := one.span(param, worker)) != (0, 0))
            ends = [0, *(stop for _, stop in spans)]
            assert [start for start, _ in spans] == ends[:-1], "no gap, nothing twice"
            assert ends[-1] == member.numel
        places = sorted((one.starts[param], member.numel) for param, member in enumerate(unit) if member.numel)
        assert all(start + numel <= after for (start, numel), (after, _) in pairwise(places))
        assert one.bounds[0] == 0 and one.bounds[-1] == sum(member.numel for member in unit)


@few
@given(models, WORKERS, st.sampled_from(["size", "device"]))
def test_shares_are_exact_in_every_unit(units: list[list[CutParameter]], workers: int, policy: str) -> None:
    sizes = [number + 1 if policy == "device" else 1 for number in range(workers)]
    for one in cut(units, workers, policy):
        for size, (start, stop) in zip(sizes, pairwise(one.bounds), strict=True):
            assert abs(stop - start - Fraction(size, sum(sizes)) * one.bounds[-1]) < 1


@few
@given(models, WORKERS)
def test_counts_differ_by_one_at_most_and_parameters_stay_whole(
    units: list[list[CutParameter]], workers: int
) -> None:
    units = [[member for member in unit if member.numel] for unit in units]
    found = [row for one in cut(units, workers, "count") for row in owners(one, workers)]
    assert all(len(row) == 1 for row in found)
    counts = [sum(row == [worker] for row in found) for worker in range(workers)]
    assert max(counts) - min(counts) <= 1


@few
@given(models, WORKERS)
def test_layers_stay_together_and_balance_up_to_the_largest(units: list[list[CutParameter]], workers: int) -> None:
    cuts = cut(units, workers, "layer")
    largest = 0
    for unit, one in zip(units, cuts, strict=True):
        keepers: dict[str, set[int]] = {}
        numels: dict[str, int] = {}
        for member, row in zip(unit, owners(one, workers), strict=True):
            keepers.setdefault(member.layer, set()).update(row)
            numels[member.layer] = numels.get(member.layer, 0) + member.numel
        assert all(len(found) <= 1 for found in keepers.values())
        largest = max([largest, *numels.values()])
    by_unit = [[stop - start for start, stop in pairwise(one.bounds)] for one in cuts]
    kept = [sum(numels) for numels in zip(*by_unit, strict=True)]
    assert max(kept) - min(kept) <= largest


def test_a_bigger_device_keeps_more() -> None:
    one = cut_state([[CutParameter(layer="", numel=900)]], workers=3, policy="device", capacities="2+0+1")
    assert one[0].bounds == (0, 600, 600, 900)


def test_capacities_of_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match=r"capacities=0\+0 leave nobody"):
        cut_state([[CutParameter(layer="", numel=9)]], workers=2, policy="device", capacities="0+0")
