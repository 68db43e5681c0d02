"""What is different between two sets of named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shoal.arena.tensors import as_bytes

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tensor that is not the same in both."""

    part: str
    name: str
    what: str
    """`only in the first`, `shapes (2,) and (3,)`, `values` and the like."""
    largest: float | None = None
    """The largest absolute difference between two values; None where they cannot be compared."""


def differences(part: str, first: Tensors, second: Tensors) -> Iterator[TensorDifference]:
    """Every tensor of a part that differs, in the order of names; a NaN equals itself."""
    for name in sorted(first.keys() | second.keys()):
        if name not in second or name not in first:
            what = f"only in the {'first' if name in first else 'second'}"
            yield TensorDifference(part=part, name=name, what=what)
        elif (found := _difference(part, name, first[name], second[name])) is not None:
            yield found


def _difference(part: str, name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
    if one.shape != other.shape:
        what = f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
        return TensorDifference(part=part, name=name, what=what)
    if one.dtype != other.dtype:
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in (one, other)]
        return TensorDifference(part=part, name=name, what=f"dtypes {names[0]} and {names[1]}")
    if _bits(one).equal(_bits(other)):
        return None
    return TensorDifference(part=part, name=name, what="values", largest=_largest(one, other))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(same, 0.0).max())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor.contiguous())
