"""Compressions that leave to chance what they round off or leave out: true in the mean, and the same once more."""

from __future__ import annotations

import pytest
import torch

from helpers.packed import carried, gaussian
from shoal.comm.compression import make_compression
from shoal.comm.compression.lossy import Lossy

UNBIASED = ("int8:stochastic", "randomk:0.25")
REMEMBERING = ("int8", "int8:stochastic", "topk:0.05", "randomk:0.2", "sign", "powersgd:2")
CALLS = 2000


@pytest.mark.parametrize("text", UNBIASED)
def test_without_feedback_the_mean_over_calls_is_the_tensor(text: str) -> None:
    compression, values = make_compression(text, error_feedback=False), gaussian(300, dtype=torch.float64)
    found = torch.stack([carried(compression, values) for _ in range(CALLS)])
    # Of each element its own spread over calls: five times the error that its mean may be expected to have. What
    # happens in one of so many calls may not have been seen at all.
    error, spread = (found.mean(0) - values).abs(), found.std(0) / CALLS**0.5
    seldom = 10 / CALLS * (found.amax(0) - found.amin(0)).max()
    assert bool((error <= 5 * spread + seldom).all())
    assert float(error.mean()) < 2 * float(spread.mean())
    assert float(found.std(0).max()) > 0


@pytest.mark.parametrize("text", ["int8", "topk:0.05", "sign"])
def test_others_are_not(text: str) -> None:
    compression, values = make_compression(text, error_feedback=False), gaussian(300, dtype=torch.float64)
    first, second = carried(compression, values), carried(compression, values)
    assert torch.equal(first, second) and not torch.equal(first, values)


@pytest.mark.parametrize("text", REMEMBERING)
def test_who_goes_on_with_what_is_remembered_sends_the_same_bytes(text: str) -> None:
    whole, begun = make_compression(text), make_compression(text)
    rounds = [gaussian(40, 30, seed=seed) for seed in range(6)]
    for values in rounds[:3]:
        assert torch.equal(carried(whole, values), carried(begun, values))
    resumed = make_compression(text)
    resumed.remember({name: one.clone() for name, one in begun.remembered().items()})
    forgetful = make_compression(text)
    after = [[carried(each, values) for values in rounds[3:]] for each in (whole, resumed, forgetful)]
    assert all(torch.equal(a, b) for a, b in zip(*after[:2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after[0], after[2], strict=True))


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("bf16", 1 / 2), ("int8", 257 / 1024), ("topk:0.01", 0.02), ("randomk:0.01", 0.01), ("sign", 33 / 1024)],
)
def test_the_bytes_are_those_that_it_states(text: str, ratio: float) -> None:
    compression, values = make_compression(text), gaussian(512, 1024)
    compression.encode("w", values)
    assert isinstance(compression, Lossy)
    assert compression.wire_bytes == compression.packed_bytes(values.shape, values.dtype)
    assert compression.ratio == pytest.approx(ratio, rel=0.05)
