"""`average`: workers train on their own and agree on their parameters now and then."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.errors import SpecError
from shoal.spec.averaging_footprint import ClientRooms, arena_average_regions, averaged_footprint
from shoal.spec.averaging_forms import Clip, check_clients, check_forms, check_groups
from shoal.spec.averaging_inside import WHOLE, CutTeams, check_inside, key_of_inside, written_inside
from shoal.spec.checks import require_choice, require_count
from shoal.spec.clients import SPREAD, ClientRounds
from shoal.spec.cluster import Cluster
from shoal.spec.compressing import check_compression
from shoal.spec.conduct import Claim, Conduct, StateHolder, even_fills
from shoal.spec.data import Data
from shoal.spec.footprint import Footprint, MemoryRegion
from shoal.spec.model_parallel import Sharded
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.strategy import Only, StrategySpec

if TYPE_CHECKING:
    from shoal.spec.job import Job

RATES = {"mean": 1.0, "momentum": 0.7, "nesterov": 0.7, "adam": 0.01, "yogi": 0.01}
"""By outer optimizer: its learning rate where none is written."""
KEPT_OUTSIDE = {"mean": 0, "momentum": 1, "nesterov": 1, "adam": 2, "yogi": 2}
"""By outer optimizer: the numbers that it keeps for each element."""

FEWEST_SECURE = 3
"""Workers of which none can take its own part off a sum to find another's."""
_LINEAR = ("SGD", "KerasSGD")
"""Optimizers whose mean of steps is the step with the mean of gradients."""


@dataclass(frozen=True, kw_only=True)
class Average(StrategySpec):
    """Averaging: each worker takes steps of its own on its part of every batch; after so many of them all agree on
    what their parameters have become."""

    name: ClassVar[str] = "average"
    made_by: ClassVar[str] = "shoal.strategies.average:make"
    cut_by: ClassVar[str] = "shoal.strategies.average.sizes:cut_size"
    tried_by: ClassVar[str] = "shoal.strategies.average.trying:try_inside"
    only: ClassVar[Mapping[str, Only]] = {
        "rate": Only(lambda average: average.outer != "mean", "with an outer optimizer (outer=nesterov)"),
        "momentum": Only(lambda average: average.outer != "mean", "with an outer optimizer (outer=nesterov)"),
        **dict.fromkeys(
            ("outer", "clip", "weight", "compress", "prox", "parts", "delay"),
            Only(lambda average: average.agrees_with_all, "where all agree (with=all and combine=mean)"),
        ),
        **dict.fromkeys(
            ("with_", "after"), Only(lambda average: not average.is_ensemble, "where workers agree (combine=mean)")
        ),
        "clips": Only(lambda average: average.clip != "none", "with clip=norm:1 or clip=value:0.1"),
        "groups": Only(lambda average: average.inside != "none", "with inside=data, or another strategy"),
        "share": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
        "partition": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
        "secure": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
        "scaffold": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
        "buffer": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
        "oldest": Only(lambda average: average.buffer > 0, "where nobody waits for clients (buffer=10)"),
        "held": Only(lambda average: average.clients > 0, "with clients (clients=100)"),
    }
    VIA: ClassVar[tuple[str, ...]] = ("auto", "memory", "sockets", "backend")

    every: int = 16
    """Steps that each worker takes on its own before all agree."""
    outer: str = "mean"
    """What all agree on: the `mean` of their parameters, or a step of an outer optimizer along the mean of how far
    they have come: `momentum`, `nesterov` (DiLoCo), `adam` or `yogi`."""
    rate: float = 0.0
    """The outer optimizer's learning rate; 0: 0.7, and 0.01 with adam and yogi."""
    momentum: float = 0.9
    """Of the outer optimizer; with adam and yogi the first beta."""
    weight: str = "samples"
    """What a worker counts in the mean: as much as it was trained on (`samples`), or as each other (`even`)."""
    clip: str = "none"
    """How far a worker may have come at most: `norm:1` of all its parameters together, or `value:0.1` of each."""
    clips: str = "differences"
    """What `clip` is of: how far a worker has come, or its `parameters` themselves."""
    after: int = 0
    """So many steps are synchronous first, with gradients that are summed up in each."""
    with_: str = "all"
    """Written `with`. Whom a worker agrees with: `all`, its two neighbours in a `ring`, or another one each time
    (`pairs`)."""
    parts: int = 1
    """In so many parts the parameters are agreed on, one after the other in every round."""
    delay: int = 0
    """So many steps after a part was sent it is taken in, so that it travels while workers train."""
    init: str = "auto"
    """How replicas begin: `alike`, from what the seed makes, or each from an `own` initialisation, which follows
    from the seed and the worker's number; `auto`: own for an ensemble, else alike."""
    combine: str = "mean"
    """What replicas come to: one model, their `mean`, or an `ensemble` of all of them, which agree on nothing."""
    inside: str = "none"
    """Workers of one host, or of one of `groups`, train one model in lockstep, and these agree: each has all of
    it (`data`), or a part (`sharded`, `tensor`, `pipeline`, or `mesh:shard:2,tensor:2`)."""
    groups: int = 0
    """With `inside`: so many groups of neighbouring workers; 0: each host is one."""
    compress: str = "none"
    """How differences travel between hosts: `none`, `bf16`, `fp16`, `int8`, `int8:stochastic`, `topk:0.01`,
    `randomk:0.01`, `sign`, `powersgd:4` or `zstd`; what one rounds off comes later."""
    prox: float = 0.0
    """How strongly a worker is drawn back, in each of its steps, to what was agreed on last (FedProx)."""
    clients: int = 0
    """So many clients are simulated, each with a part of the data that is its own; 0: there are none."""
    share: float = 1.0
    """The share of clients that train in a round."""
    partition: str = SPREAD
    """Which samples are a client's: an even part (`own`), or by label in drawn proportions (`dirichlet:0.5`)."""
    scaffold: bool = False
    """Whether a client's steps are corrected by how its gradients differ from those of all clients (SCAFFOLD)."""
    buffer: int = 0
    """Nobody waits for clients: so many that are back are merged, by their age, while others train on (FedBuff).
    0: rounds have a beginning and an end."""
    oldest: int = 10
    """Who is not back after so many merges is given up."""
    held: float = 0.0
    """The share of each client's samples on which it is not trained, but evaluated."""
    secure: bool = False
    """Whether a worker masks what its clients have come to, so that others learn the sum of all workers alone."""
    via: str = "auto"
    """How workers of one host talk: through its `memory` (the default), our own `sockets`, or torch's collectives
    (`backend`, the default on GPUs)."""

    def __post_init__(self) -> None:
        require_count("average", "every", self.every)
        require_count("average", "after", self.after, least=0)
        require_count("average", "parts", self.parts)
        require_count("average", "delay", self.delay, least=0)
        require_choice("average", "outer", self.outer, tuple(RATES))
        require_choice("average", "weight", self.weight, ("samples", "even"))
        require_choice("average", "with", self.with_, ("all", "ring", "pairs"))
        require_choice("average", "init", self.init, ("auto", "alike", "own"))
        require_choice("average", "combine", self.combine, ("mean", "ensemble"))
        object.__setattr__(self, "inside", written_inside(self.inside))
        require_count("average", "groups", self.groups, least=0)
        require_choice("average", "via", self.via, self.VIA)
        require_choice("average", "clips", self.clips, ("differences", "parameters"))
        Clip.parse(self.clip)
        check_compression(self.compress)
        check_clients(self)
        if not (math.isfinite(self.prox) and self.prox >= 0):
            raise SpecError(f"average: prox must be a number from 0 on, found {self.prox!r}.")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise SpecError(
                f"average: rate must be a number above 0, found {self.rate!r}; with outer={self.outer} it is "
                f"{RATES[self.outer]:g} where it is left out."
            )
        if not 0 <= self.momentum < 1:
            raise SpecError(f"average: momentum must be from 0 to below 1, found {self.momentum!r}.")
        if self.compress != "none" and self.via in ("memory", "backend"):
            raise SpecError(
                f"average: compress={self.compress} is for what travels over our sockets, but via={self.via}; "
                "leave one of them out."
            )
        check_forms(self)
        check_inside(self)

    @classmethod
    def unknown_key(cls, key: str, known: Collection[str]) -> SpecError:
        return key_of_inside(key) or super().unknown_key(key, known)

    def clients_on(self, workers: int) -> ClientRounds | None:
        """Who trains in which round, where there are clients."""
        if not self.clients:
            return None
        return ClientRounds.of(
            count=self.clients,
            share=self.share,
            partition=self.partition,
            every=self.every,
            workers=workers,
            held=self.held,
            buffer=self.buffer,
            oldest=self.oldest,
        )

    def round_steps(self, workers: int) -> int:
        """Steps from one agreement to the next."""
        clients = self.clients_on(workers)
        return self.every if clients is None else clients.steps

    @property
    def agrees_with_all(self) -> bool:
        """Whether nobody is left apart after an agreement."""
        return self.with_ == "all" and not self.is_ensemble

    @property
    def is_ensemble(self) -> bool:
        """Whether workers agree on nothing, and what is saved are all of their models."""
        return self.combine == "ensemble"

    @property
    def begins_apart(self) -> bool:
        """Whether each worker begins with an initialisation of its own."""
        return self.init == "own" or (self.init == "auto" and self.is_ensemble)

    @property
    def outer_rate(self) -> float:
        """The learning rate of the outer optimizer."""
        return self.rate or RATES[self.outer]

    @property
    def cuts_inside(self) -> bool:
        """Whether teams have a model that is cut over their workers."""
        return self.inside not in WHOLE

    @property
    def shares_memory(self) -> bool:
        """Whether workers of one host meet in memory that outlives them, where the host can."""
        return self.via in ("auto", "memory") and not self._is_told_apart and not self.secure

    @property
    def _is_told_apart(self) -> bool:
        """Whether more is said between workers than the values that each leaves at the end of a round."""
        return self.after > 0 or self.is_streamed or self.inside != "none"

    def outlives_hosts_of(self, workers: int) -> bool:
        """Whether any of so many workers can begin a round for another: all that they have in common is what they
        agreed on last, and nothing of what they tell is kept back."""
        is_plain = self.agrees_with_all and not (self.begins_apart or self._is_told_apart)
        is_plain = is_plain and not (self.clients or self.secure) and self.compress == "none"
        return is_plain and self.via == "auto" and workers > 1

    @property
    def is_streamed(self) -> bool:
        """Whether parts of the parameters are agreed on by themselves, or later than they are sent."""
        return self.parts > 1 or self.delay > 0

    def parts_sent(self, step: int) -> list[int]:
        """The parts of the parameters that are sent after this step: they are spread over a round, the last one at
        its end."""
        at = (step - self.after - 1) % self.every + 1
        return [part for part in range(self.parts) if self.every * (part + 1) // self.parts == at]

    def is_agreement(self, step: int, workers: int) -> bool:
        """Whether so many workers agree after this step, in which each was on its own."""
        return step > self.after and (step - self.after) % self.round_steps(workers) == 0

    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        workers = cluster.places
        if (teams := CutTeams.of(self, workers)) is not None:
            return teams.conduct(cluster, self)
        in_memory = self.shares_memory and cluster.device == "cpu" and not cluster.is_spread
        alone = self._why_alone(cluster)
        return Conduct(
            fills=even_fills(workers, workers),
            slots_are_free=False,
            gathers=workers > 1,
            spans_hosts=cluster.device == "cpu" and self.via in ("auto", "sockets"),
            outlives_hosts=cluster.is_spread and cluster.device == "cpu" and self.outlives_hosts_of(workers),
            open_commits=self.round_steps(workers),
            clients=self.clients_on(workers),
            protects="clients" if self.clients and self._is_protectable else "",
            meets=False,
            state=StateHolder.EACH_WORKER,
            has_one_state=False,
            puts_aside="replica",
            is_ensemble=self.is_ensemble,
            has_places=in_memory,
            hosts_several=in_memory,
            has_journal=in_memory,
            why={
                "protects": self._why_not_protected(),
                "has_places": alone,
                "hosts_several": alone,
                "slots": f"strategy={self} gives each worker one part of every batch",
                "meets": f"with strategy={self} each worker takes steps of its own",
            },
        )

    def _why_alone(self, cluster: Cluster) -> str:
        """Why a worker's model is in no memory that outlives it, where it is in none."""
        keys = {
            "secure=on": self.secure,
            f"after={self.after}": self.after > 0,
            f"parts={self.parts}": self.parts > 1,
            f"delay={self.delay}": self.delay > 0,
            f"inside={self.inside}": self.inside != "none",
            f"via={self.via}": self.via in ("sockets", "backend"),
        }
        if (key := next((key for key, is_written in keys.items() if is_written), None)) is not None:
            return f"with {key} each worker's model lies in its process alone; leave {key} out"
        place = f"device={cluster.device}" if cluster.device != "cpu" else f"on={cluster.on}"
        return f"with {place} the model of each worker lies in its process alone; use CPUs of one host"

    @property
    def _is_protectable(self) -> bool:
        """Whether nothing of clients is told but one sum."""
        return self.clip == "none" and not (self.scaffold or self.held or self.buffer)

    def _why_not_protected(self) -> str:
        if self.buffer:
            return f"buffer={self.buffer} takes clients as they come, not as chance would have it; leave it out"
        if self.held:
            return f"held={self.held:g} tells how each client fares, to which no noise is added; leave it out"
        if self.scaffold:
            return (
                "scaffold=on tells clients each other's mean gradients, to which no noise is added; leave it out"
            )
        if self.clients:
            return f"clip={self.clip} cuts differences off, too; write privacy's own clip alone"
        return (
            f"strategy={self} has no clients whose differences are clipped; use clients=100,partition=own, or data"
        )

    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        is_plain = self.outer == "mean" and self.weight == "samples" and not (self.clients or self.prox)
        is_plain = is_plain and self.clip == self.compress == "none"
        is_plain = is_plain and not self.is_streamed
        is_plain = is_plain and not (self.is_ensemble or (self.begins_apart and workers > 1))
        if workers == 1 and is_plain:
            return Claim.SUMS
        return (
            Claim.SUMS
            if self.every == 1 and is_plain and self._all_of(workers) and optimizer in _LINEAR
            else Claim.RESULT
        )

    def _all_of(self, workers: int) -> bool:
        """Whether so many agree with all others."""
        return self.agrees_with_all or workers <= 2 or (self.with_ == "ring" and workers == 3)

    def check(self, job: Job) -> None:
        cluster = job.cluster
        if self.clients and (cluster.is_spread or cluster.device != "cpu"):
            raise SpecError(
                f"Job: clients={self.clients} are simulated in the memory of one host, but on={cluster.on} and "
                f"device={cluster.device}; use one host and device=cpu."
            )
        check_groups(self, cluster)
        if self.secure and cluster.places < FEWEST_SECURE:
            raise SpecError(
                f"Job: secure=on tells workers the sum of all alone, but of {cluster.places} each would know the "
                f"other's part from it; use at least {FEWEST_SECURE} workers."
            )
        if self.compress != "none" and not cluster.is_spread and self.via != "sockets":
            raise SpecError(
                f"Job: compress={self.compress} is for what travels between hosts, but on={cluster.on} is one "
                "host, whose memory all share; leave it out."
            )
        if self.is_streamed and cluster.device != "cpu" and self.via != "sockets":
            raise SpecError(
                f"Job: parts and delay are for what we send ourselves, but device={cluster.device} uses torch; "
                "add via=sockets."
            )
        if self.via == "memory" and cluster.device != "cpu":
            raise SpecError(
                f"Job: via=memory goes through the host's memory, but device={cluster.device}; use via=backend, "
                "or leave it out."
            )

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        if (teams := CutTeams.of(self, run.workers)) is not None:
            kept = KEPT_OUTSIDE[self.outer]
            return teams.footprint(model, run, cut or CutSize(), every=self.every, outer_kept=kept)
        return averaged_footprint(
            model,
            run,
            cut or CutSize(),
            every=self.round_steps(run.workers),
            outer_kept=KEPT_OUTSIDE[self.outer],
            is_gossip=not (self.agrees_with_all or self.is_ensemble),
            is_ensemble=self.is_ensemble,
            has_groups=self.inside != "none",
            in_memory=self._is_in_memory(run),
            rooms=self._client_rooms,
        )

    def _is_in_memory(self, run: RunSize) -> bool:
        return (
            self.shares_memory
            and run.shares_memory
            and (run.workers > 1 or run.is_replaceable or self.clients > 0)
        )

    def segment_regions(self, model: ModelSize, run: RunSize, cut: CutSize) -> tuple[MemoryRegion, ...]:
        """What is reserved in the segment that all workers of a host map."""
        return arena_average_regions(
            model,
            run,
            cut,
            every=self.round_steps(run.workers),
            outer_kept=KEPT_OUTSIDE[self.outer],
            rooms=self._client_rooms,
        )

    @property
    def _client_rooms(self) -> ClientRooms:
        return ClientRooms(
            controls=self.clients if self.scaffold else 0, versions=self.oldest + 1 if self.buffer else 0
        )

    def for_inference(self) -> StrategySpec:
        """A saved model is one model; one that was cut is cut again, so that nobody has to hold it."""
        return Sharded() if self.cuts_inside else Data()
