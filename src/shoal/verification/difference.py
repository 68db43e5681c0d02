"""How far two sets of named tensors are apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shoal.arena.tensors import as_bytes

TINY = 1e-2
"""A tensor this much smaller than the largest of its kind is judged by that one's scale: what should be zero
(the gradient of a bias before BatchNorm) is rounding noise, which agrees with nothing, not even itself."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest difference between two sets of tensors."""

    relative: float
    """Relative to the largest magnitude of its tensor; infinite where a name, shape or type differs."""
    bitwise: bool
    """Whether every bit is the same."""
    worst: str = ""
    """Where the largest difference is; empty where there is none."""


def difference(ours: Tensors, reference: Tensors, kind_of: Callable[[str], str] = str) -> Difference:
    """Compare by name. `kind_of` tells which names hold values of one kind, and so of one scale."""
    if odd := sorted(set(ours) ^ set(reference)):
        where = "the strategy's run" if odd[0] in ours else "one process"
        return Difference(float("inf"), False, f"{odd[0]} (only in {where})")
    scales = _scales(reference, kind_of)
    worst, largest, bitwise = "", 0.0, True
    for name, expected in reference.items():
        found = ours[name]
        if same_bits(found, expected):
            continue
        bitwise = False
        relative = _relative(found, expected, TINY * scales[kind_of(name)])
        if relative > largest or not worst:
            worst, largest = name, relative
    return Difference(largest, bitwise, worst)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit; a NaN equals itself, and 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (as_bytes(tensor.contiguous()) for tensor in (one, other))
    return torch.equal(*flat)


def _scales(tensors: Tensors, kind_of: Callable[[str], str]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, tensor in tensors.items():
        scales[kind_of(name)] = max(scales.get(kind_of(name), 0.0), _magnitude(tensor))
    return scales


def _relative(found: torch.Tensor, expected: torch.Tensor, least_scale: float) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    apart = float((found.double() - expected.double()).abs().max())
    scale = max(_magnitude(expected), least_scale)
    if apart == 0.0:
        return 0.0
    # Written so that a NaN on either side counts as infinitely far.
    return apart / scale if scale > 0 and apart < float("inf") else float("inf")


def _magnitude(tensor: torch.Tensor) -> float:
    finite = tensor.double().abs()
    return float(torch.nan_to_num(finite, nan=0.0, posinf=0.0).max()) if tensor.numel() else 0.0
