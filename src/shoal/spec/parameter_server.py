"""`ps`: a parameter server, as the user writes it and as it behaves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count, require_number
from shoal.spec.cluster import Cluster
from shoal.spec.conduct import Claim, Conduct, StateHolder, even_fills
from shoal.spec.data import Data
from shoal.spec.footprint import Footprint, MemoryRegion
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.served_footprint import ServedPlan, served_footprint, served_regions
from shoal.spec.strategy import Only, StrategySpec

if TYPE_CHECKING:
    from shoal.spec.job import Job

MOST_SHARDS = 4096
"""All members are told in one message who holds which."""
MOST_CELLS_PER_PUSH = 1 << 14
"""Parts of the data that one push may be made of: it lists them, and so does who holds them."""
_ADJUSTED: Mapping[str, Only] = {
    "bound": Only(lambda ps: ps.sync.startswith("ssp:") and not ps.is_lockstep, "with sync=ssp:N"),
    "rate": Only(
        lambda ps: not ps.is_lockstep and ps.push == "gradients",
        "where workers push gradients, and do not go in lockstep",
    ),
    "eviction": Only(lambda ps: ps.is_leased, "with sync=asp or shares=speed"),
}
"""By what the coordinator may adjust: when it can."""
LOSSLESS = ("none", "zstd")
"""Ways to compress that change no bit."""


@dataclass(frozen=True, kw_only=True)
class ParameterServer(StrategySpec):
    """Servers hold the model; workers pull parameters and push gradients, in lockstep or each at its own pace."""

    name: ClassVar[str] = "ps"
    made_by: ClassVar[str] = "shoal.strategies.ps.strategy:make"
    cut_by: ClassVar[str] = "shoal.strategies.ps.sizes:cut_size"
    only: ClassVar[Mapping[str, Only]] = {
        "compress": Only(lambda ps: ps.wire == "tcp", "on what travels: with wire=tcp"),
        "journal": Only(lambda ps: ps.wire != "tcp", "in the host's memory, and not with wire=tcp"),
        "capacities": Only(lambda ps: ps.placement == "capacity", "with placement=capacity"),
        **dict.fromkeys(("hosts", "agree"), Only(lambda ps: ps.servers == "host", "with servers=host")),
        "placement": Only(
            lambda ps: ps.servers != "host" and (ps.placement != "capacity" or ps.capacities != "even"),
            "where servers share the model (servers=N), and placement=capacity with capacities=",
        ),
        "overlap": Only(
            lambda ps: (ps.push, ps.pool) == ("gradients", "none"), "where each gradient is pushed by itself"
        ),
        **dict.fromkeys(
            ("ahead", "diverging"),
            Only(lambda ps: not ps.is_lockstep, "where workers do not go in lockstep, as with sync=asp"),
        ),
        **dict.fromkeys(
            ("rate", "damping"),
            Only(
                lambda ps: ps.has_lone_updates,
                "where a gradient may be an update of its own: with sync=asp, ssp:N or alternate:K, and "
                "push=gradients",
            ),
        ),
        "adjust": Only(
            lambda ps: all(_ADJUSTED[each].holds(ps) for each in ps.adjustments),
            "as far as there is something to adjust: "
            + ", ".join(f"{name} {when.words}" for name, when in _ADJUSTED.items()),
        ),
    }
    SYNC: ClassVar[str] = "bsp, asp, ssp:N, alternate:K or quorum:k/n"

    servers: str = "1"
    """How many servers share the model, each with its part; `host`: a whole copy for each group of workers."""
    sync: str = "bsp"
    """Who waits for whom: `bsp` (all for all, as one process would compute), `asp` (nobody), `ssp:N` (nobody is
    more than N steps ahead), `alternate:K` (K free steps, then one together), `quorum:k/n` (for k of n)."""
    replicas: str = "auto"
    """Copies of each part on another server, which takes over when one dies: 0 or 1; default 1 with 2 or more
    servers."""
    shards: str = "auto"
    """Parts of the model, which move between servers whole; default by its size."""
    placement: str = "size"
    """Which parameters go together: by `size`, by `count`, by `layer` kind, or by `capacity` of the servers."""
    capacities: str = "even"
    """How much each server can carry, as in `2+1`."""
    wire: str = "auto"
    """How the bulk travels: `memory` (shared by the processes of one host, the default there) or `tcp`."""
    compress: str = "none"
    """What is sent over tcp: `none`, `bf16`, `fp16`, `int8`, `int8:stochastic`, `topk:0.01`, `randomk:0.01`,
    `sign`, `powersgd:4` or `zstd`."""
    push: str = "gradients"
    """`gradients`, or `parameters`: workers train on their own and the server averages what they push."""
    every: int = 1
    """With push=parameters: push after so many steps of one's own."""
    via: str = "direct"
    """The way of a push: `direct`, `ring` (workers add theirs up, one pushes) or `router:N` (in each of N groups
    one worker adds up what the others send it, and pushes); those two with sync=bsp."""
    leader: str = "fixed"
    """With via=ring or router:N: who pushes for its group; `fixed`: the first, or `rotate`: each in turn."""
    pool: str = "none"
    """Gradients gathered on the worker and pushed together, with sync=asp: `threads:2,ms:50,count:8` computes 2 at
    a time and pushes after 50 ms or when 8 are in; by default 1 thread, no time limit, 8."""
    hosts: int = 2
    """With servers=host: into how many groups the workers of one machine are divided."""
    agree: str = "allreduce"
    """With servers=host: how the copies are kept in step; `allreduce`, `ring`, or `scatter-sum` (asynchronous)."""
    overlap: str = "auto"
    """`on`: each part of the model is fetched just before it computes and pushed as soon as its gradient is there;
    `off`: all at once; `auto`: by parts where they have to travel (tcp)."""
    ahead: int = 0
    """Steps that a worker may begin before the servers have its last push: 0, so that it sees its own updates, or
    1, so that it computes while they work."""
    shares: str = "even"
    """Samples of each worker's step: `even`, or `speed`: as its measured speed asks for (with asp or ssp:N)."""
    rate: str = "auto"
    """The learning rate of an update with part of the batch: `share` (lr/workers), `root` (lr/√workers), `full`;
    `auto`: root for optimizers that adapt it to each parameter, such as Adam, share for the others."""
    damping: str = "none"
    """`staleness`: a gradient computed d updates ago counts 1/(1 + d/workers)."""
    adjust: str = "none"
    """What the coordinator may adjust as it sees fit, joined by +: `bound` (of ssp), `rate` (the learning rate, by
    how late gradients are), `eviction` (of hopelessly slow workers)."""
    diverging: str = "rollback"
    """When the loss runs away: `rollback` to the last good state with half the learning rate, `stop` or
    `ignore`."""
    standby: int = 0
    """1: a process that has all that a coordinator needs, and is one as soon as the coordinator dies."""
    journal: bool = True
    """Save each part of a shard before it changes, so that whoever follows a server that was killed in the middle
    of an update can make it good. Without this, such a death ends the run, unless there is a replica."""

    def __post_init__(self) -> None:
        for name in ("servers", "replicas", "shards"):
            object.__setattr__(self, name, str(getattr(self, name)))  # numbers are welcome, too
        if self.servers != "host":
            require_number("ps", "servers", self.servers)
        _check_sync(self.sync)
        require_choice("ps", "replicas", self.replicas, ("auto", "0", "1"))
        if self.shards != "auto":
            require_number("ps", "shards", self.shards)
            require_count("ps", "shards", int(self.shards), most=MOST_SHARDS)
        require_choice("ps", "placement", self.placement, ("size", "count", "layer", "capacity"))
        if self.capacities != "even" and not re.fullmatch(r"\d+(\.\d+)?(\+\d+(\.\d+)?)*", self.capacities):
            raise SpecError(
                f"ps: capacities must be 'even' or one number per server as in 2+1, found {self.capacities!r}."
            )
        require_choice("ps", "wire", self.wire, ("auto", "memory", "tcp"))
        require_choice("ps", "push", self.push, ("gradients", "parameters"))
        require_count("ps", "every", self.every, most=MOST_CELLS_PER_PUSH)
        if not re.fullmatch(r"direct|ring|router:[1-9]\d*", self.via):
            raise SpecError(f"ps: via must be direct, ring or router:N, found {self.via!r}.")
        require_choice("ps", "leader", self.leader, ("fixed", "rotate"))
        if self.pool != "none" and not re.fullmatch(
            r"(threads|ms|count):\d+(,(threads|ms|count):\d+)*", self.pool
        ):
            raise SpecError(f"ps: pool must be like threads:2,ms:50,count:8, found {self.pool!r}.")
        require_count("ps", "hosts", self.hosts)
        require_choice("ps", "agree", self.agree, ("allreduce", "ring", "scatter-sum"))
        require_choice("ps", "overlap", self.overlap, ("auto", "on", "off"))
        require_choice("ps", "ahead", str(self.ahead), ("0", "1"))
        require_choice("ps", "standby", str(self.standby), ("0", "1"))
        require_choice("ps", "shares", self.shares, ("even", "speed"))
        require_choice("ps", "rate", self.rate, ("auto", "share", "root", "full"))
        require_choice("ps", "damping", self.damping, ("none", "staleness"))
        for part in self.adjustments:
            require_choice("ps", "adjust", part, ("bound", "rate", "eviction"))
        require_choice("ps", "diverging", self.diverging, ("rollback", "stop", "ignore"))
        if self.replicas == "1" and self.num_servers < 2:
            raise SpecError(
                f"ps: replicas=1 needs a second server to hold the copies, but servers={self.servers}; use "
                "servers=2 or more, or replicas=0."
            )
        if self.every > 1 and self.push != "parameters":
            raise SpecError(
                f"ps: every={self.every} is for push=parameters, found push={self.push}; add push=parameters, or "
                "use the task's accumulate= for fewer, larger gradients."
            )

    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        # Leased parts are those of a worker's step; slots are dealt to as many workers as there ever may be. A
        # quorum says itself of how many it is.
        usual = cluster.workers * self.cells_per_worker if self.is_leased else cluster.places
        usual = max(usual, self.slots_of_quorum)
        own_parts = f"with strategy={self} a step is cut by its workers; leave slots out, or use sync=bsp"
        return Conduct(
            fills=even_fills(slots or usual, cluster.workers),
            slots_are_free=self.is_lockstep
            or not (self.is_leased or self.slots_of_quorum or self.why_workers_stay),
            servers=self.num_servers,
            mixes_devices=True,
            standbys=self.standby,
            workers_vary=not self.why_workers_stay,
            is_lockstep=self.is_lockstep,
            leaves_out_the_late=self.sync.startswith("quorum:"),
            meets=self.meets,
            can_skip=False,
            spans_hosts=self.wire != "memory" and self.servers != "host",
            takes_hosts=self.is_leased and self.wire != "memory" and self.servers != "host",
            state=StateHolder.SERVERS if self.push == "gradients" else StateHolder.EACH_WORKER,
            has_one_state=self.push == "gradients",
            puts_aside="" if self.compress in LOSSLESS else "unsent",
            why={
                "spares": f"strategy={self} replaces workers and servers that die by itself; set 0",
                "on_failure=shrink": f"strategy={self} replaces those that die; use replace or stop",
                "limits of workers": f"{self.why_workers_stay}; or give a number",
                "limits of hosts": f"with strategy={self} every worker has parts of its own; use sync=asp, or "
                "leave hosts out",
                "slots": own_parts,
                "spans_hosts": f"strategy={self} works in one host's memory; use wire=tcp and servers=N",
                "can_skip": f"strategy={self} cannot; use data",
                "meets": f"with strategy={self} workers do not wait for each other in memory that they share",
            },
        )

    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        averages_otherwise = self.push == "parameters" and (self.every > 1 or optimizer != "SGD")
        copies_drift = self.servers == "host" and self.agree == "scatter-sum"
        by_timing = not self._waits_for_all(workers) or self.shares == "speed" or self.pool != "none"
        if by_timing or averages_otherwise or copies_drift or self.compress not in LOSSLESS:
            return Claim.RESULT
        plain = (self.push, self.via) == ("gradients", "direct") and self.servers != "host"
        return Claim.BITS if plain else Claim.SUMS

    def _waits_for_all(self, workers: int) -> bool:
        """Whether no step depends on who is fast; a single worker has nobody to be ahead of."""
        takes_all = self.sync.startswith("quorum:") and len(set(self.sync.removeprefix("quorum:").split("/"))) == 1
        return self.is_lockstep or takes_all or (workers == 1 and self.ahead == 0)

    def check(self, job: Job) -> None:
        from shoal.spec.update_path import check_update_path

        cluster = job.cluster
        if cluster.device != "cpu" and (self.via != "direct" or self.pool != "none" or self.servers == "host"):
            raise SpecError(
                f"Job: strategy={self} has workers add up what they push in the host's memory, but "
                f"device={cluster.device}; leave via, pool and servers=host out, or use device=cpu."
            )
        follows_speed = self.sync == "asp" or (self.sync.startswith("ssp:") and not self.is_lockstep)
        if self.shares == "speed" and not follows_speed:
            raise SpecError(
                f"Job: shares=speed lets faster workers take more of the data, which sync={self.sync} cannot; "
                "use asp or ssp:N."
            )
        if self.slots_of_quorum and self.slots_of_quorum != job.num_slots:
            raise SpecError(
                f"Job: sync={self.sync} is of {self.slots_of_quorum} slots, but there are {job.num_slots}, at "
                f"least one for each worker; write quorum:k/{job.num_slots}."
            )
        room = self.room(job.num_slots, cluster.workers)
        if cluster.max_workers is not None and cluster.max_workers > room:
            raise SpecError(
                f"Job: workers={cluster.written_workers} is more than there is room for: a run of strategy={self} "
                f"that begins with {cluster.workers} may have up to {room}; begin with more, or end with fewer."
            )
        check_update_path(self, cluster.workers)

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        regions = self.segment_regions(model, run, cut or CutSize())
        return served_footprint(self._plan(model, run), regions, model, run)

    def segment_regions(self, model: ModelSize, run: RunSize, cut: CutSize) -> tuple[MemoryRegion, ...]:
        """What is reserved in the segment of the host, or in each process's own over tcp."""
        plan = self._plan(model, run)
        keeps_state = not plan.trains_at_workers and model.whole_state is None
        return served_regions(plan, model if keeps_state else replace(model, mirrored=(), scalars=0), cut)

    def _plan(self, model: ModelSize, run: RunSize) -> ServedPlan:
        by_host = self.servers == "host"
        by_element = model.whole_state is None or self.push == "parameters"
        return ServedPlan(
            copies=self.num_copies,
            used_copies=self.hosts if by_host else 1 + self.num_replicas,
            is_by_host=by_host,
            room=self.room(run.slots, run.workers),
            used_room=run.workers if self.is_leased else run.slots,
            marks=not self.is_lockstep and self.diverging != "ignore",
            outlives_servers=self.outlives_servers(by_element=by_element),
            servers=self.num_servers,
            shares_memory=self.wire != "tcp",
            trains_at_workers=self.push == "parameters",
            # In the worker, and in its host's memory after each push that may be under way, and the one before.
            unsent_copies=1 + self.kept_pushes if self.kept_pushes else 0,
        )

    @property
    def leaves_pushes(self) -> bool:
        """Whether what a worker pushes concerns whoever follows it, who goes on where it was."""
        return not self.is_leased or self.compress not in LOSSLESS

    @property
    def kept_pushes(self) -> int:
        """Of so many a worker's host has what they left unsent: of those that may be under way, and one more."""
        return 0 if self.compress in LOSSLESS else self.ahead + 2

    def outlives_servers(self, *, by_element: bool) -> bool:
        """Whether a killed server's parts can be gone on with; `by_element`: updated element by element."""
        return self.wire != "tcp" and self.agree != "scatter-sum" and by_element

    def room(self, slots: int, workers: int) -> int:
        """How many slots, or ranks where workers may come and go, have buffers of their own."""
        return max(2 * workers, workers + 8) if self.is_leased else slots

    def across_hosts(self) -> Self:
        return replace(self, wire="tcp") if self.wire == "auto" and self.servers != "host" else self

    def for_inference(self) -> Data:
        """Workers have the whole model, and what is saved does not change: no server is needed."""
        return Data()

    @property
    def num_servers(self) -> int:
        """How many server processes there are."""
        return self.hosts if self.servers == "host" else int(self.servers)

    @property
    def num_replicas(self) -> int:
        """Copies of each part besides the one that serves."""
        if self.replicas == "auto":
            return int(self.num_servers > 1 and self.servers != "host")
        return int(self.replicas)

    @property
    def num_copies(self) -> int:
        """Homes for every part: for who serves it, and for its backup or next holder; or one for each host."""
        return self.hosts if self.servers == "host" else 2

    @property
    def num_shards(self) -> int | None:
        """Parts of the model, where the user chose."""
        return None if self.shards == "auto" else int(self.shards)

    @property
    def server_capacities(self) -> tuple[float, ...]:
        """What each server can carry; empty where they are equal."""
        return () if self.capacities == "even" else tuple(float(part) for part in self.capacities.split("+"))

    @property
    def adjustments(self) -> tuple[str, ...]:
        """What the coordinator may adjust by the user's leave."""
        return () if self.adjust == "none" else tuple(self.adjust.split("+"))

    @cached_property
    def is_lockstep(self) -> bool:
        """Whether the result does not depend on timing."""
        return self.sync in ("bsp", "ssp:0")

    @property
    def meets(self) -> bool:
        """Whether slots can bring rows to each other: all compute one step, in memory that they share."""
        is_direct = (self.push, self.via, self.ahead) == ("gradients", "direct", 0) and self.servers != "host"
        return self.is_lockstep and is_direct and self.wire != "tcp"

    @property
    def has_lone_updates(self) -> bool:
        """Whether servers update by gradients of a part of the batch, as they come."""
        gathers = self.is_lockstep or self.sync.startswith("quorum:")
        return self.push == "gradients" and not gathers

    @property
    def slots_of_quorum(self) -> int:
        """The n of `quorum:k/n`; 0 where there is none."""
        return int(self.sync.split("/")[1]) if self.sync.startswith("quorum:") else 0

    @property
    def why_workers_stay(self) -> str:
        """Why no worker can come or go while a run goes on; empty where they can."""
        if self.servers == "host":
            return "with servers=host every server has its own group of workers; use servers=N"
        if self.via != "direct":
            return f"with via={self.via} workers add up what they push among themselves; use via=direct"
        if self.push == "parameters" and not self.is_leased:
            return (
                f"with push=parameters and sync={self.sync} a worker's part is trained by it alone; use sync=asp"
            )
        return ""

    @cached_property
    def is_leased(self) -> bool:
        """Whether parts of the data go to whoever asks next; else every worker has its own."""
        return self.sync == "asp" or self.shares == "speed"

    @cached_property
    def cells_per_worker(self) -> int:
        """Parts of a step's batch for each worker: more than one where shares are to be fine."""
        return 4 if self.shares == "speed" else 1


def _check_sync(sync: str) -> None:
    quorum = re.fullmatch(r"quorum:([1-9]\d*)/([1-9]\d*)", sync)
    if quorum and int(quorum[1]) > int(quorum[2]):
        raise SpecError(
            f"ps: sync={sync} waits for more gradients than there are; write quorum:k/n with k up to n."
        )
    if not quorum and not re.fullmatch(r"bsp|asp|ssp:\d+|alternate:[1-9]\d*", sync):
        raise SpecError(f"ps: sync must be {ParameterServer.SYNC}, found {sync!r}.")
