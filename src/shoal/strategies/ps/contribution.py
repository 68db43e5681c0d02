"""What a worker hands over to be pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model.half_range import Seen


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a worker computed on some cells."""

    clock: int
    cells: Sequence[int]
    buffer: int
    """The buffer that holds it."""
    weight: float
    loss: float
    scaled: bool
    scale: float = 1.0
    """What servers are to multiply it by, besides making it a mean."""
    seen: Seen | None = None
    """What the gradient looks like, where losses are scaled."""
    half: Sequence[float] = ()
    """What all workers know of the loss scale, where they agree on it."""
    loss_parts: Sequence[float] = ()
    """Of each number that the loss is told with, weighted as the loss."""
    is_inherited: bool = False
    """Another worker, now dead, has left it in memory."""

    @property
    def is_spoilt(self) -> bool:
        """Whether the gradient is no number."""
        return self.seen is not None and self.seen.not_finite > 0
