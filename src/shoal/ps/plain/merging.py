"""How far clients have come, merged as they come: who began from an older version counts less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import SpecError
from shoal.spec.checks import require_count


@dataclass(frozen=True, kw_only=True)
class Merging:
    """What a server does with differences (FedBuff)."""

    buffer: int = 1
    """So many make a new version."""
    oldest: int = 10
    """Who began from an older one is left out."""
    clip: float | None = None
    """How long a difference may be at most, all parameters together; a client is not asked whether it agrees."""
    rate: float = 1.0
    """How far the server goes along their mean."""

    def __post_init__(self) -> None:
        require_count("Merging", "buffer", self.buffer)
        require_count("Merging", "oldest", self.oldest, least=0)
        for name, value in (("clip", self.clip), ("rate", self.rate)):
            if value is not None and not 0 < value < math.inf:
                raise SpecError(
                    f"Merging: {name} must be a number above 0, found {value!r}; leave it out for the default."
                )


class MergeBuffer:
    """Those that have come since the last version."""

    def __init__(self, merging: Merging) -> None:
        self._merging = merging
        self._sum: dict[str, Tensor] = {}
        self._count = 0
        self.left_out = 0
        """Differences that were too old."""

    def add(self, differences: Mapping[str, Tensor], age: int) -> dict[str, Tensor] | None:
        """How far the server goes now, where this was the last that a new version needs."""
        if age < 0:
            raise SpecError(
                f"A difference is from a version that is to come ({-age} ahead); read it from here first."
            )
        norm = math.hypot(*(float(torch.linalg.vector_norm(each.double())) for each in differences.values()))
        if not math.isfinite(norm):
            raise SpecError("A difference has values that are no numbers; nothing of it was merged.")
        if age > self._merging.oldest:
            self.left_out += 1
            return None
        clip = self._merging.clip
        factor = (1 + age) ** -0.5 * (1.0 if clip is None or norm <= clip else clip / norm)
        for name, each in differences.items():
            part = each * factor
            self._sum[name] = part if name not in self._sum else self._sum[name].add_(part)
        self._count += 1
        if self._count < self._merging.buffer:
            return None
        found = {name: each * (self._merging.rate / self._count) for name, each in self._sum.items()}
        self._sum, self._count = {}, 0
        return found
