"""What a step in shared memory comes to, once the gradients of all slots are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.model.half_range import HalfState
from shoal.step.compute import Sums


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """The same in every process, and in whoever takes over from one."""

    step: int
    sums: Sums
    scale: float
    """What summed gradients are multiplied by."""
    touched: Any
    """Who touched what, where not all touched all."""
    counts: tuple[int, ...]
    """By slot: the samples that were used."""
    half: HalfState
    """What all know of half precision after it."""
    is_taken: bool
    """Whether the optimizer takes it; not where a gradient is no number."""
