"""The mean of how far several have come, from where each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shoal.spec.averaging import Clip
from shoal.strategies.groups.vectors import Vectors

_BLOCK = 1 << 17
"""Elements that are computed at a time, so that they stay in the cache."""


@torch.no_grad()
def mean_difference(
    agreed: Mapping[torch.dtype, torch.Tensor],
    found: Sequence[Mapping[torch.dtype, torch.Tensor]],
    shares: Sequence[float],
    num_params: Mapping[torch.dtype, int],
    clip: Clip | None,
) -> Vectors:
    """What was agreed on last, taken from each of `found`, one or the other clipped, and added up by shares: the
    bits that workers get who add up what each of them has computed for itself.

    `num_params`: by kind, so many elements come first that are clipped.
    """
    factors = [_factor(agreed, each, num_params, clip) for each in found]
    mean = {kind: torch.empty_like(vector) for kind, vector in agreed.items()}
    for kind, base in agreed.items():
        count = num_params.get(kind, 0)
        for block, is_clipped in _blocks(len(base), count):
            total = torch.zeros_like(base[block])
            for each, share, factor in zip(found, shares, factors, strict=True):
                if is_clipped and clip is not None and not clip.is_of_difference:
                    part = _cut(each[kind][block].clone(), clip, factor).sub_(base[block])
                else:
                    part = each[kind][block] - base[block]
                    if is_clipped and clip is not None:
                        _cut(part, clip, factor)
                part.mul_(share)
                total.add_(part)
            mean[kind][block] = total
    return mean


def _cut(values: torch.Tensor, clip: Clip, factor: float | None) -> torch.Tensor:
    if clip.kind == "value":
        return values.clamp_(-clip.most, clip.most)
    return values if factor is None else values.mul_(factor)


def _blocks(length: int, count: int) -> Iterator[tuple[slice, bool]]:
    """All elements in order, and whether they are of the first so many."""
    for first, last, is_first in ((0, count, True), (count, length, False)):
        for start in range(first, last, _BLOCK):
            yield slice(start, min(start + _BLOCK, last)), is_first


def _factor(
    agreed: Mapping[torch.dtype, torch.Tensor],
    found: Mapping[torch.dtype, torch.Tensor],
    num_params: Mapping[torch.dtype, int],
    clip: Clip | None,
) -> float | None:
    """What makes one's difference, or one's parameters, as short as they may be; None where they are."""
    if clip is None or clip.kind != "norm":
        return None
    norms = [
        (found[kind][:count] - agreed[kind][:count] if clip.is_of_difference else found[kind][:count])
        .double()
        .norm()
        for kind, count in num_params.items()
    ]
    norm = float(torch.stack(norms).norm())
    return clip.most / norm if norm > clip.most else None
