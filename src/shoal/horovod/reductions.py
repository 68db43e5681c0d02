"""How tensors of all ranks become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache

import torch

from shoal.comm.group import Reduction, sum_in_order
from shoal.comm.group.base import Change, Fold


class ReduceOp(StrEnum):
    """What is made of them."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


def _folded_by(combine: object) -> Fold:
    def fold(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        out.copy_(parts[0])
        for part in parts[1:]:
            combine(out, part, out=out)  # type: ignore[operator]
        return out

    return fold


_FOLDS: dict[ReduceOp, Fold] = {
    ReduceOp.SUM: sum_in_order,
    ReduceOp.AVERAGE: sum_in_order,
    ReduceOp.MIN: _folded_by(torch.minimum),
    ReduceOp.MAX: _folded_by(torch.maximum),
    ReduceOp.PRODUCT: _folded_by(torch.mul),
}


def make_reduction(op: ReduceOp, size: int, dtype: torch.dtype, prescale: float, postscale: float) -> Reduction:
    """How `size` tensors become one by `op`, which is not Adasum."""
    divisor = size if op is ReduceOp.AVERAGE else 1
    before, after = _scaled(dtype, prescale, 1), _scaled(dtype, postscale, divisor)
    found = Reduction(_FOLDS[op])
    if before is not None:
        found = replace(found, before=before)
    return found if after is None else replace(found, after=after)


@cache
def check_reducible(op: ReduceOp, dtype: torch.dtype) -> str:
    """Why tensors of this type cannot be reduced so; empty where they can. Found out on two numbers: once a group
    has begun, nobody may fail."""
    try:
        two = torch.zeros(2, dtype=dtype)
        if op is ReduceOp.ADASUM:
            adasum([two, two])
            return "" if dtype.is_floating_point else f"Adasum takes floating-point tensors, found {dtype}."
        how = make_reduction(op, 2, dtype, 0.5, 0.5)
        how.after(how.fold([two, how.brought(two)], torch.empty_like(two)), two)
    except (RuntimeError, TypeError, NotImplementedError):
        return f"torch cannot compute the {op} of {dtype} tensors; cast them first."
    return ""


def _scaled(dtype: torch.dtype, factor: float, divisor: int) -> Change | None:
    """Multiplied and divided; None where nothing changes."""
    if factor == 1 and divisor == 1:
        return None
    if dtype.is_floating_point or dtype.is_complex:
        share = factor / divisor
        return lambda given, out: torch.mul(given, share, out=out)
    if factor == 1:
        # Whole numbers are divided, not multiplied by what a fraction is rounded to.
        return lambda given, out: torch.div(given, divisor, rounding_mode="floor", out=out)
    return lambda given, out: out.copy_(given.double().mul_(factor).div_(divisor))


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pairs are added as far as they are orthogonal, averaged as far as they are parallel; then pairs of pairs."""
    level = [part.clone() for part in parts]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [pair[0] if len(pair) == 1 else _adasum_of_two(*pair) for pair in pairs]
    return level[0]


def _adasum_of_two(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    first, second = one.double(), other.double()
    dot, of_first, of_second = (
        float((a * b).sum()) for a, b in ((first, second), (first, first), (second, second))
    )
    share_first = 1 - dot / (2 * of_first) if of_first else 1.0
    share_second = 1 - dot / (2 * of_second) if of_second else 1.0
    return (share_first * first + share_second * second).to(one.dtype)
