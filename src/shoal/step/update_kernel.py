"""Kernels that decompress, clip and update a flat shard in one go over its memory.

Nothing else imports Triton, which comes with torch's builds for GPUs; what they compute is written in
`flat_rules.py`, for any device. Arguments of a kernel are float32: what must not be rounded before it is used is
read from `settings`, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton import language as tl

BLOCK, WARPS = 1024, 8
_PREPARED = 4
"""Numbers that all blocks of an update read: rate, step size, what scales squares, factor."""


@triton.jit
def _prepare(
    numbers,
    settings,
    rate_at,
    rate,
    factor,
    steps,
    count,
    reads_rate: tl.constexpr,
    counts: tl.constexpr,
    room: tl.constexpr,
):
    """Count this step, and find what depends on its number. In one warp: what it reads it writes afterwards."""
    given = tl.load(rate_at).to(tl.float64) if reads_rate else rate.to(tl.float64)
    tl.store(numbers, given.to(tl.float32))
    tl.store(numbers + 3, tl.load(factor))
    if counts:
        step = tl.load(steps).to(tl.float64) + 1
        of_means = 1 - tl.exp(step * tl.log(tl.load(settings)))
        of_squares = 1 - tl.exp(step * tl.log(tl.load(settings + 1)))
        tl.store(numbers + 1, (given / of_means).to(tl.float32))
        tl.store(numbers + 2, (1 / tl.sqrt(of_squares)).to(tl.float32))
        at = tl.arange(0, room)
        tl.store(steps + at, step.to(tl.float32), mask=at < count)


@triton.jit
def _adam(
    values,
    gradients,
    means,
    squares,
    numbers,
    size,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    decoupled: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    rate, step_size = tl.load(numbers), tl.load(numbers + 1)
    of_squares, factor = tl.load(numbers + 2), tl.load(numbers + 3)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * factor
    value = tl.load(values + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    square = tl.load(squares + at, mask=inside, other=0.0)
    if decoupled:
        value -= rate * decay * value
    else:
        gradient += decay * value
    mean = mean + rest1 * (gradient - mean)
    square = beta2 * square + rest2 * gradient * gradient
    value -= step_size * mean / (tl.sqrt(square) * of_squares + eps)
    tl.store(values + at, value, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)


@triton.jit
def _sgd(
    values,
    gradients,
    moving,
    numbers,
    size,
    momentum,
    decay,
    moves: tl.constexpr,
    nesterov: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    rate, factor = tl.load(numbers), tl.load(numbers + 3)
    value = tl.load(values + at, mask=inside, other=0.0)
    change = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * factor + decay * value
    if moves:
        moved = momentum * tl.load(moving + at, mask=inside, other=0.0) + change
        tl.store(moving + at, moved, mask=inside)
        change = change + momentum * moved if nesterov else moved
    tl.store(values + at, value - rate * change, mask=inside)


class Kernels:
    """The updates of one shard on a GPU."""

    def __init__(self, device: torch.device, betas: tuple[float, float] | None) -> None:
        self._numbers = torch.zeros(_PREPARED, device=device)
        self._betas = betas
        self._settings = torch.tensor(betas or (0.0, 0.0), dtype=torch.float64, device=device)

    def adam(self, shard: Any, rate: float | torch.Tensor, group: Mapping[str, Any], *, decoupled: bool) -> None:
        """`shard`: a `FlatShard`."""
        beta1, beta2 = group["betas"]
        if (beta1, beta2) != self._betas:
            self._betas = (beta1, beta2)
            self._settings.copy_(torch.tensor(self._betas, dtype=torch.float64))
        self._prepare(shard, rate, counts=True)
        size = shard.values.numel()
        _adam[(triton.cdiv(size, BLOCK),)](
            shard.values, shard.gradients, shard.state["exp_avg"], shard.state["exp_avg_sq"], self._numbers, size,
            beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], float(group["weight_decay"]),
            decoupled=decoupled, block=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def sgd(self, shard: Any, rate: float | torch.Tensor, group: Mapping[str, Any]) -> None:
        """`shard`: a `FlatShard`."""
        self._prepare(shard, rate, counts=False)
        size, momentum = shard.values.numel(), float(group["momentum"])
        _sgd[(triton.cdiv(size, BLOCK),)](
            shard.values, shard.gradients, shard.state.get("momentum_buffer", shard.values), self._numbers, size,
            momentum, float(group["weight_decay"]),
            moves=momentum != 0, nesterov=bool(group["nesterov"]), block=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def _prepare(self, shard: Any, rate: float | torch.Tensor, *, counts: bool) -> None:
        reads, count = isinstance(rate, torch.Tensor), shard.steps.numel()
        _prepare[(1,)](
            self._numbers, self._settings, rate if reads else self._numbers, 0.0 if reads else float(rate),
            shard.factor, shard.steps, count, reads_rate=reads, counts=counts,
            room=triton.next_power_of_2(max(1, count)), num_warps=1,
        )  # fmt: skip
