"""What a simulated run is made of: the job, the faults, the deaths."""

from __future__ import annotations

from dataclasses import dataclass, field

from helpers.ps_sim.network import NetFaults

COORDINATOR, SERVER, WORKER = "coordinator", "server", "worker"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A death, as a message is about to be sent; who dies while sending loses the rest of what it had to say."""

    at: int
    """The number of that message; later where a shard has neither a filled backup then nor a journal in memory
    that outlives its servers, for that one's loss is final."""
    role: str
    rank: int | None = 0
    """None: any of the role that lives then."""
    lives_on: bool = False
    """It is only taken for dead: cut off from the coordinator, it goes on with all others as if nothing was."""
    cut_off: bool = False
    """It lives, but all packets from it and to it vanish from now on, and nobody tells the coordinator."""
    amid: bool = False
    """It dies inside the next update that it makes, with half of the values changed."""


@dataclass(frozen=True)
class Scale:
    """The job gets another number of servers, or workers, as a message is about to be sent."""

    at: int
    """The number of that message."""
    servers: int | None = None
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job and what happens to it."""

    sync: str
    servers: int = 2
    replicas: int = 1
    """Copies of each shard besides its primary's; with one server there are none."""
    workers: int = 2
    slots: int = 0
    """Parts of each step; 0: one for each worker."""
    shards: int = 2
    steps: int = 4
    faults: NetFaults = field(default_factory=NetFaults)
    kills: tuple[Kill, ...] = ()
    scales: tuple[Scale, ...] = ()
    together: bool = False
    """All shards close their rounds together, as clipping wants it."""
    spoilt: frozenset[int] = frozenset()
    """Cells whose gradient is no number: they are taken, and not applied."""
    save_every: int = 0
    """Steps after which the first worker saves what the servers have, at a border that all come to; 0: never.
    Nobody is only taken for dead then."""
    saves_on_demand: bool = False
    """The borders are not planned: the first worker asks for one when it is time."""
    in_memory: bool = False
    """Gradients lie in buffers that workers and servers share, as on one host; where no round needs all of one at
    once, each shard's part is pushed as it is made. Nobody is only taken for dead there."""
    waits_for_newcomers: bool = False
    """Nobody is ordered a second time because the first takes long to come, as where every death is told of."""
    through_codec: bool = False
    """Every message becomes bytes and back."""

    @property
    def shares_memory(self) -> bool:
        """Copies of a shard lie in one memory. Nobody is taken for dead there who lives: a host knows its own."""
        return not any(kill.role == SERVER and kill.lives_on for kill in self.kills)

    @property
    def can_save(self) -> bool:
        """Workers come to a border of their own; in lockstep every step is one, and a quorum leaves cells out."""
        return self.leased or self.sync.startswith(("ssp", "alternate"))

    @property
    def borders(self) -> range:
        """The cells after which the state is saved, as a coordinator that knows them plans them."""
        if not self.save_every or self.saves_on_demand or not self.leased:
            return range(0)
        return range(self.save_every * self.num_slots, self.num_cells, self.save_every * self.num_slots)

    @property
    def leased(self) -> bool:
        return self.sync == "asp"

    @property
    def final_servers(self) -> int:
        return next((one.servers for one in reversed(self.scales) if one.servers), self.servers)

    @property
    def final_workers(self) -> int:
        return next((one.workers for one in reversed(self.scales) if one.workers), self.workers)

    @property
    def num_slots(self) -> int:
        return self.slots or self.workers

    @property
    def num_cells(self) -> int:
        return self.steps * self.num_slots


class SimulationFailed(AssertionError):
    """A run that did not end as it must; says how to repeat it, and its last messages."""

    def __init__(self, what: str, scenario: Scenario, seed: int, trace: list[str]) -> None:
        super().__init__("\n".join([what, f"Repeat: Cluster({scenario!r}, seed={seed}).run()", *trace]))
