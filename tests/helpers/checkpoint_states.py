"""Small training states to save."""

from __future__ import annotations

from typing import Any

import torch

from shoal.checkpoint.snapshot import Snapshot


def state(step: int = 200, *, width: int = 700, facts: dict[str, Any] | None = None) -> Snapshot:
    """A state that follows from its step: every kind of tensor, tied weights, several chunks."""
    torch.manual_seed(step)
    tokens = torch.randn(width, 8)
    model = {
        "tokens": tokens,
        "head": tokens,
        "narrow": torch.randn(33).to(torch.bfloat16),
        "count": torch.tensor(step),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "columns": torch.randn(4, 6).t(),
        "waves": torch.randn(5, dtype=torch.complex64),
        "tiny": torch.randn(3).to(torch.float8_e5m2),
    }
    return Snapshot(
        step=step,
        model=model,
        optimizer={"tokens/momentum_buffer": torch.randn(width, 8), "tokens/step": torch.tensor(float(step))},
        losses=torch.rand(step, dtype=torch.float64),
        rng={"0/torch": torch.get_rng_state(), "1/python": torch.arange(9, dtype=torch.uint8)},
        facts={"slots": 2, "job": {"target": "digits.py:task"}} if facts is None else facts,
    )


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    """Every name, dtype, shape and bit."""
    assert found.step == wanted.step and found.facts == wanted.facts
    for (part, ours), (_, theirs) in zip(found.parts(), wanted.parts(), strict=True):
        assert ours.keys() == theirs.keys(), part
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
            assert _bytes(ours[name]) == _bytes(tensor), name


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
