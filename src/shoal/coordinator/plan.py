"""`JobPlan`: what a coordinator is told about its job when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SpecError
from shoal.ps.consistency import Mode, parse_sync
from shoal.spec.checks import require_choice, require_count

ADJUSTMENTS = ("shares", "bound", "rate", "divergence", "eviction")
"""What the coordinator may adjust on its own; see `policy.py`."""


@dataclass(frozen=True, kw_only=True)
class EarlierCells:
    """What the checkpoint was made of that a run goes on from, as far as somebody kept a book of it."""

    cells: int = 0
    samples: int = 0
    is_clean: bool = True
    """Each was applied once."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job as its coordinator sees it: shards and who starts with them, workers, cells of data, and patience."""

    num_shards: int
    shard_bytes: tuple[int, ...]
    owners: tuple[int, ...]
    """The server, by number, that each shard starts at."""
    backups: tuple[int | None, ...]
    """The server that keeps each shard's copy at the start; None where there is none."""
    servers: int
    replicas: int = 1
    """Copies of each shard besides its primary: 0 or 1."""
    workers: int
    most_workers: int = 1 << 16
    """How many there is room for, where a run may be given more."""
    shares_memory: bool = False
    """All servers have their copies in one memory, so that a home there must not have two holders."""
    outlives_servers: bool = False
    """That memory stays when a server dies, with all that another needs to go on with its shards."""
    has_copies: bool = False
    """Each server has a whole copy for its own group of workers, so that neither can become more or fewer."""
    num_cells: int
    """Parts of the data that this run is to apply, each once; none where one goes on after its last step."""
    num_samples: int = 0
    """Samples of all these parts together."""
    slots: int = 1
    """Parts of each step's batch."""
    past: EarlierCells = EarlierCells()
    borders: range = range(0)
    """Where cells are leased: numbers of cells after which all come together, so that the state can be saved."""
    leased: bool
    """Cells are handed out one by one; else slots are dealt to the workers, and each knows its own cells."""
    why_workers_stay: str = ""
    """Why there can be neither more nor fewer workers while the job runs; empty where there can."""
    sync: str = "asp"
    adjust: tuple[str, ...] = ("divergence",)
    """Which of `ADJUSTMENTS` are on."""
    mark_every_s: float = 30.0
    """How often the shards remember their values, to go back to if the loss diverges; 0: never."""
    max_rollbacks: int = 3
    """How often a diverging run goes back to its last mark before it is stopped."""
    silent_after_s: float = 5.0
    """A member that says nothing for so long is replaced."""
    form_timeout_s: float = 60.0
    """How long all servers together may take to come."""
    start_timeout_s: float = 30.0
    """How long a replacement may take to come before another one is ordered."""
    max_failures: int = 0
    """Members that may be lost while no cell is committed; 0 for as many as the job has members, plus two."""

    def __post_init__(self) -> None:
        for name in ("num_shards", "servers", "workers"):
            require_count("JobPlan", name, getattr(self, name))
        require_count("JobPlan", "num_cells", self.num_cells, least=0)
        if self.replicas not in (0, 1):
            raise SpecError(f"JobPlan: replicas must be 0 or 1, found {self.replicas!r}.")
        for name in self.adjust:
            require_choice("JobPlan", "adjust", name, ADJUSTMENTS)
        for name in ("shard_bytes", "owners", "backups"):
            if len(getattr(self, name)) != self.num_shards:
                raise SpecError(
                    f"JobPlan: {name} must have one entry for each of {self.num_shards} shards, "
                    f"found {len(getattr(self, name))}."
                )
        for shard, (owner, backup) in enumerate(zip(self.owners, self.backups, strict=True)):
            if not 0 <= owner < self.servers or backup == owner or not 0 <= (backup or 0) < self.servers:
                raise SpecError(
                    f"JobPlan: shard {shard} needs two different servers out of {self.servers}, "
                    f"found owner {owner} and backup {backup}."
                )

    @property
    def failures_allowed(self) -> int:
        """Members that may be lost while no cell is committed."""
        return self.max_failures or self.workers + self.servers + 2

    @property
    def bound(self) -> int | None:
        """The staleness bound that `sync` sets; None where it has none."""
        rule = parse_sync(self.sync)
        return rule.bound if rule.mode is Mode.SSP else None
