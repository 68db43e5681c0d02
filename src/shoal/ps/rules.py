"""What all shards of a job, and all copies of each, agree on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from shoal.ps.consistency import Consistency


class Together(Enum):
    """What shards do together."""

    NORMS = auto()
    """They close a round knowing each other's norms; see `settlement.py`."""
    SUM = auto()
    """Each is a whole copy, and closes a round with what all have gathered."""
    RING = auto()
    """The same, added up in a ring; see `ring.py`."""
    CHANGES = auto()
    """Each is a whole copy, updates on its own, and tells the others what it changed; see `scatter.py`."""


@dataclass(frozen=True, kw_only=True)
class ShardRules:
    """How shards take what is pushed to them."""

    consistency: Consistency
    slots: int
    """Parts of a global batch: cell `c` is slot `c % slots` of step `c // slots + 1`."""
    workers: int
    """Ranks that there are at the start."""
    leased: bool = False
    """Cells go to whoever asks next, so that every rank has a clock; else every slot has one."""
    average: bool = False
    """Pushes are parameters to be averaged, not gradients."""
    every: int = 1
    """Steps of its own that a worker takes before it pushes."""
    rate_power: float = 1.0
    """An update with part of the batch takes the learning rate times its share to this power."""
    damped: bool = False
    """The later a gradient, the less it counts."""
    start: int = 0
    """Steps that were done before this run began."""
    together: Together | None = None
    """What the shards learn of each other before they update, or afterwards."""
    own_slots: range | None = None
    """Where each shard is a whole copy for some of the workers: their slots; else all are."""
    first_rank: int = 0
    """The first of the ranks that there are."""

    @property
    def counted(self) -> range:
        """Whose clocks count from the start."""
        if self.leased:
            return range(self.first_rank, self.first_rank + self.workers)
        return self.own_slots or range(self.slots)

    @property
    def adds_up(self) -> bool:
        """Whether rounds are closed with what all shards have gathered."""
        return self.together in (Together.SUM, Together.RING)
