"""Error feedback: what one push leaves behind, later ones bring."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.compression import Compression, make_compression
from shoal.errors import SpecError

LOSSY = ("bf16", "fp16", "int8", "int8:stochastic", "topk:0.05", "randomk:0.2", "sign", "powersgd:2")
BY_CHANCE = ("int8:stochastic", "randomk:0.2")
"""Other numbers in every call: see `test_compression_chance.py`."""


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def carried(compression: Compression, values: torch.Tensor, key: str = "w") -> torch.Tensor:
    out = torch.empty_like(values)
    compression.decode(compression.encode(key, values), out)
    return out


@settings(deadline=None, max_examples=80)
@given(
    text=st.sampled_from(LOSSY),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    shape=st.sampled_from([(1,), (7,), (1500,), (20, 30), (3, 400)]),
    num_pushes=st.integers(1, 12),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_what_arrives_adds_up_to_what_was_pushed_less_one_residual(text, dtype, shape, num_pushes, seed, scale):
    compression = make_compression(text)
    pushed, arrived = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for push in range(num_pushes):
        values = (gaussian(*shape, seed=seed + push) * scale).to(dtype)
        pushed += values.double()
        arrived += carried(compression, values).double()
    residual = compression.residual("w")
    missing = torch.zeros(shape, dtype=torch.float64) if residual is None else residual.double()
    # Each push rounds its sum with the residual once, in float32 or float64.
    precision = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    largest = float(torch.maximum(pushed.abs().max(), missing.abs().max())) + scale * 10
    assert (arrived + missing - pushed).abs().max() <= 4 * num_pushes * precision * largest


@pytest.mark.parametrize("text", LOSSY)
def test_a_constant_gradient_arrives_in_full_on_average(text):
    compression, values = make_compression(text), gaussian(40, 30).float()
    num_pushes = 200
    mean = sum(carried(compression, values) for _ in range(num_pushes)) / num_pushes
    without = make_compression(text, error_feedback=False)
    assert (mean - values).norm() < 0.1 * values.norm()
    assert (mean - values).norm() < 0.2 * (carried(without, values) - values).norm()


@pytest.mark.parametrize("text", [text for text in LOSSY if text not in BY_CHANCE])
def test_without_feedback_nothing_is_remembered(text):
    compression = make_compression(text, error_feedback=False)
    values = gaussian(1500).float()
    first = carried(compression, values)
    assert torch.equal(carried(compression, values), first)
    assert compression.residual("w") is None


@pytest.mark.parametrize("text", [text for text in LOSSY if text not in BY_CHANCE])
def test_tensors_have_residuals_of_their_own_until_forgotten(text):
    compression = make_compression(text)
    values, other = gaussian(40, 30).float(), gaussian(40, 30, seed=1).float()
    first = carried(compression, values)
    assert torch.equal(carried(compression, other, key="v"), carried(make_compression(text), other))
    second = carried(compression, values)
    compression.forget("w")
    assert torch.equal(carried(compression, values), first)
    assert not torch.equal(second, first)
    with pytest.raises(SpecError, match="forget"):
        compression.encode("w", gaussian(41, 30).float())
    compression.forget("w")
    assert carried(compression, gaussian(41, 30).float()).shape == (41, 30)


def final_loss(compression: Compression | None) -> float:
    """The loss of noisy linear regression after SGD on gradients that travelled compressed."""
    num_samples, num_inputs, num_outputs = 512, 40, 20
    inputs, noise = gaussian(num_samples, num_inputs).float(), gaussian(num_samples, num_outputs, seed=1).float()
    targets = inputs @ gaussian(num_inputs, num_outputs, seed=2).float() + 0.5 * noise
    weights = torch.zeros(num_inputs, num_outputs)
    order = torch.Generator().manual_seed(3)
    for step in range(1000):
        batch = torch.randint(num_samples, (64,), generator=order)
        gradient = inputs[batch].t() @ (inputs[batch] @ weights - targets[batch]) / 64
        arrived = carried(compression, gradient) if compression is not None else gradient
        weights -= 0.03 * (1 - step / 1000) * arrived
    return float((inputs @ weights - targets).square().mean())


def test_sgd_with_feedback_ends_where_plain_sgd_ends_and_without_it_does_not():
    plain = final_loss(None)
    for text in LOSSY:
        assert final_loss(make_compression(text)) < 1.03 * plain, text
    assert final_loss(make_compression("topk:0.05", error_feedback=False)) > 1.2 * plain
