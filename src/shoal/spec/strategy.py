"""Strategies as the user writes them: `name:key=value,key=value`, or the dataclass; both are one thing."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_type_hints

from shoal.errors import SpecError, unknown
from shoal.spec.checks import require_choice, require_count, require_number

MOST_SHARDS = 4096
"""All members are told in one message who holds which."""
MOST_CELLS_PER_PUSH = 1 << 14
"""Parts of the data that one push may be made of: it lists them, and so does who holds them."""

_REGISTRY: dict[str, type[StrategySpec]] = {}


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How to train. A subclass per strategy; its fields are the keys of the written form."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.name] = cls

    def __str__(self) -> str:
        changed = [
            f"{spec.name}={_written(getattr(self, spec.name))}"
            for spec in fields(self)
            if spec.default is MISSING or getattr(self, spec.name) != spec.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def _written(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Data(StrategySpec):
    """Synchronous data parallel: each worker trains on its part of the batch, all take the same step."""

    name: ClassVar[str] = "data"
    VIA: ClassVar[tuple[str, ...]] = ("auto", "arena", "backend", "ring", "tree", "central", "allgather")

    via: str = "auto"
    """How gradients are summed: shared memory (`arena`, the default on one host), torch's own collectives
    (`backend`), or ours over sockets."""
    batchnorm: str = "local"
    """`local`: each slot normalises by its own part of the batch; `sync`: by the whole batch."""
    shares: str = "even"
    """How many slots each worker fills: `even`, or one number per worker, as in `1+3`. `speed`: even, but how many
    samples a slot gets follows how fast it is filled."""
    partition: str = "spread"
    """`spread`: every batch is cut and shared; `relay`: workers take turns, each with a block of an epoch's
    batches, and hand the model on."""
    journal: bool = True
    """Keep the redo journal that lets another process finish the step of one that was killed."""

    def __post_init__(self) -> None:
        require_choice("data", "via", self.via, self.VIA)
        require_choice("data", "batchnorm", self.batchnorm, ("local", "sync"))
        require_choice("data", "partition", self.partition, ("spread", "relay"))
        if self.shares not in ("even", "speed") and not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", self.shares):
            raise SpecError(
                f"data: shares must be 'even', 'speed', or one number per worker as in 1+3, found {self.shares!r}."
            )
        if self.shares == "speed":
            self._check_speed()

    def _check_speed(self) -> None:
        """Sizes are decided in shared memory, from the time that each slot takes for itself."""
        if not self.shares_memory:
            other = "partition=relay" if self.partition == "relay" else f"via={self.via}"
            raise SpecError(
                f"data: shares=speed measures workers through shared memory, which {other} does not use; use "
                "via=arena, or shares=even."
            )
        if self.batchnorm == "sync":
            raise SpecError(
                "data: shares=speed needs each slot's own time, but with batchnorm=sync all wait for one another "
                "in every pass; use batchnorm=local, or shares=even."
            )

    @property
    def shares_memory(self) -> bool:
        """Whether the model lies in memory that all workers of a host share, where the host can."""
        return self.via in ("auto", "arena") and self.partition == "spread"

    @property
    def counts(self) -> list[int]:
        """The written shares, one per worker; empty where no numbers are written."""
        return [int(count) for count in self.shares.split("+")] if self.shares[0].isdigit() else []

    def slots_per_worker(self, slots: int, workers: int) -> list[int]:
        """How many slots each worker fills; they add up to `slots`."""
        if not self.counts:
            return [slots * (rank + 1) // workers - slots * rank // workers for rank in range(workers)]
        counts = self.counts
        if len(counts) != workers or sum(counts) != slots:
            raise SpecError(
                f"data: shares={self.shares} names {len(counts)} workers and {sum(counts)} slots, "
                f"but the job has {workers} workers and {slots} slots."
            )
        return counts


@dataclass(frozen=True, kw_only=True)
class ParameterServer(StrategySpec):
    """Servers hold the model; workers pull parameters and push gradients, in lockstep or each at its own pace."""

    name: ClassVar[str] = "ps"
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
    """What is sent over tcp: `none`, `bf16`, `fp16`, `int8`, `topk:0.01`, `powersgd:4` or `zstd`."""
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

    @property
    def is_lockstep(self) -> bool:
        """Whether the result does not depend on timing."""
        return self.sync in ("bsp", "ssp:0")

    @property
    def is_leased(self) -> bool:
        """Whether parts of the data go to whoever asks next; else every worker has its own."""
        return self.sync == "asp" or self.shares == "speed"

    @property
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


def parse_strategy(text: str | StrategySpec) -> StrategySpec:
    """The strategy that `name:key=value,…` names. A spec passes through unchanged."""
    if isinstance(text, StrategySpec):
        return text
    name, _, written = text.partition(":")
    if name not in _REGISTRY:
        raise unknown("strategy", name, _REGISTRY)
    cls = _REGISTRY[name]
    types = {key: kind for key, kind in get_type_hints(cls).items() if key in {f.name for f in fields(cls)}}
    values: dict[str, Any] = {}
    # A comma separates keys only where another `key=` follows, so that values may hold commas.
    for item in re.split(r",(?=\w+=)", written) if written else []:
        key, equals, value = item.partition("=")
        if key not in types:
            raise unknown(f"strategy {name}: key", key, types)
        if not equals:
            raise SpecError(f"strategy {name}: write {key}=value, found {item!r}.")
        values[key] = _convert(name, key, value, types[key])
    return cls(**values)


def _convert(name: str, key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "on", "off", "yes", "no", "1", "0"):
            raise SpecError(f"strategy {name}: {key} must be on or off, found {value!r}.")
        return value.lower() in ("true", "on", "yes", "1")
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise SpecError(f"strategy {name}: {key} must be a number, found {value!r}.") from None
    return value
