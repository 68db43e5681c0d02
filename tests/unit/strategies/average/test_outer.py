"""What is cut off a difference, and what an outer optimizer makes of the mean of all."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import SpecError
from shoal.spec import Average
from shoal.spec.averaging import Clip
from shoal.strategies.average.meaning import mean_difference
from shoal.strategies.average.outer import OuterStep, clip_, difference_

KIND = torch.float64


def vectors(*values: float) -> dict[torch.dtype, torch.Tensor]:
    return {KIND: torch.tensor(values, dtype=KIND)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("none", (3.0, -4.0)), ("norm:1", (0.6, -0.8)), ("norm:6", (3.0, -4.0)), ("value:3.5", (3.0, -3.5))],
)
def test_too_much_is_cut_off(text: str, expected: tuple[float, float]) -> None:
    difference = vectors(3.0, -4.0)
    clip_(difference, Clip.parse(text))
    assert difference[KIND].tolist() == pytest.approx(list(expected))


@pytest.mark.parametrize("text", ["none", "norm:1", "value:0.1"])
@pytest.mark.parametrize("of", ["differences", "parameters"])
def test_who_reads_all_and_who_computes_its_own_come_to_the_same_bits(text: str, of: str) -> None:
    """In memory all compute the mean from what each has left; else each brings its own, clipped."""
    clip, counts = Clip.parse(text, of), {torch.float32: 900}
    agreed = {torch.float32: torch.randn(1000)}
    found = [{torch.float32: torch.randn(1000)} for _ in range(3)]
    shares, total = [0.5, 0.3, 0.2], torch.zeros(1000)
    mean = mean_difference(agreed, found, shares, counts, clip)
    for each, share in zip(found, shares, strict=True):
        copied = {torch.float32: each[torch.float32].clone()}
        difference = difference_(copied, agreed, lambda own: {torch.float32: own[torch.float32][:900]}, clip)
        total += difference[torch.float32] * share
        if text != "none":
            kept = difference[torch.float32] + (agreed[torch.float32] if of == "parameters" else 0)
            most = float(kept[:900].norm() if text == "norm:1" else kept[:900].abs().max())
            assert most == pytest.approx(clip.most, rel=1e-3)
    assert torch.equal(mean[torch.float32], total)


@pytest.mark.parametrize("text", ["1", "norm", "norm:", "norm:0", "value:-1", "length:1", "norm:inf"])
def test_a_clip_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="clip must be none, norm:NUMBER or value:NUMBER"):
        Average(clip=text)


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ("mean", [1.0, 2.0, 3.0]),
        ("momentum", [0.5, 0.5 + 0.75, 0.5 + 0.75 + 0.875]),
        ("nesterov", [0.75, 0.75 + 0.875, 0.75 + 0.875 + 0.9375]),
    ],
)
def test_outer_steps_are_the_optimizers_own(outer: str, expected: list[float]) -> None:
    rate = {} if outer == "mean" else {"rate": 0.5, "momentum": 0.5}
    agreed, found = vectors(0.0), []
    step = OuterStep(Average(outer=outer, **rate), agreed)
    for _ in expected:
        step.take(vectors(1.0))
        found.append(float(agreed[KIND]))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("outer", ["mean", "momentum", "nesterov", "adam"])
def test_it_goes_on_with_its_state(outer: str) -> None:
    whole, begun = vectors(0.0, 1.0), vectors(0.0, 1.0)
    first, second = OuterStep(Average(outer=outer), whole), OuterStep(Average(outer=outer), begun)
    for step in (first, second):
        step.take(vectors(0.3, -0.1))
    later = OuterStep(Average(outer=outer), begun)
    later.load({name: one.clone() for name, one in second.state().items()})
    for step in (first, later):
        step.take(vectors(0.2, 0.7))
    assert torch.equal(whole[KIND], begun[KIND])
