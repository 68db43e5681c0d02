"""What a step trains on: micro-batches, in the parts that slots have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LoadedBatch = tuple[Any, float, int]
"""A micro-batch, what it counts, and how many samples it holds."""


@dataclass(frozen=True)
class Part:
    """One slot's part of a step."""

    slot: int
    load: Callable[[], Iterator[LoadedBatch]]
    """Reads the batches; may be called again by a process that takes this slot over."""
    total_weight: float | None
    """What the batches of all slots count together, where that is known beforehand; not where some may be
    skipped."""
