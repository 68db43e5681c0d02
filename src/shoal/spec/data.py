"""`data`: synchronous data parallel, as the user writes it and as it behaves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from shoal.errors import SpecError
from shoal.spec.checks import require_choice
from shoal.spec.cluster import MIXED, Cluster
from shoal.spec.compressing import check_compression
from shoal.spec.conduct import Claim, Conduct, even_fills, fills_of
from shoal.spec.data_footprint import arena_footprint, arena_regions
from shoal.spec.device_footprint import device_footprint
from shoal.spec.footprint import Footprint, MemoryRegion
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.strategy import Only, StrategySpec
from shoal.spec.whole_footprint import handed_on, summed_over_sockets, whole_footprint

if TYPE_CHECKING:
    from shoal.spec.job import Job


MOST_AHEAD = 3
"""Steps that a worker may have asked of its GPU before it knows what the first of them came to."""


@dataclass(frozen=True, kw_only=True)
class Data(StrategySpec):
    """Synchronous data parallel: each worker trains on its part of the batch, all take the same step."""

    name: ClassVar[str] = "data"
    made_by: ClassVar[str] = "shoal.strategies.data:make"
    cut_by: ClassVar[str] = "shoal.strategies.data.sizes:cut_size"
    only: ClassVar[Mapping[str, Only]] = {
        "journal": Only(lambda data: data.shares_memory, "in shared memory (via=arena)"),
        "between": Only(lambda data: data.via in ("auto", "chain"), "between hosts (via=chain)"),
    }
    VIA: ClassVar[tuple[str, ...]] = ("auto", "arena", "chain", "backend", "ring", "tree", "central", "allgather")

    via: str = "auto"
    """How gradients are summed: shared memory (`arena`, the default on one host), the same with a chain from host
    to host (`chain`, the default on several), torch's own collectives (`backend`), or ours over sockets."""
    batchnorm: str = "local"
    """`local`: each slot normalises by its own part of the batch; `sync`: by the whole batch."""
    shares: str = "even"
    """How many slots each worker fills: `even`, or one number per worker, as in `1+3`. `speed`: even, but how many
    samples a slot gets follows how fast it is filled; with `device=cuda+cpu`, how fast each device was before the
    run."""
    partition: str = "spread"
    """`spread`: every batch is cut and shared; `relay`: workers take turns, each with a block of an epoch's
    batches, and hand the model on."""
    journal: bool = True
    """Keep the redo journal that lets another process finish the step of one that was killed."""
    between: str = "exact"
    """How gradients travel between hosts: as they are (`exact`), as `bf16`, in half the bytes, or compressed as
    `fp16`, `int8`, `int8:stochastic`, `topk:0.01`, `randomk:0.01`, `sign`, `powersgd:4` or `zstd` say; what one
    step rounds off comes with the next."""

    def __post_init__(self) -> None:
        require_choice("data", "via", self.via, self.VIA)
        require_choice("data", "batchnorm", self.batchnorm, ("local", "sync"))
        require_choice("data", "partition", self.partition, ("spread", "relay"))
        if self.between != "exact":
            check_compression(self.between, "between", "exact")
        if self.via == "chain" and self.batchnorm == "sync":
            raise SpecError(
                "data: via=chain sums gradients between hosts, but batchnorm=sync needs sums in every pass, too; "
                "use via=ring, or batchnorm=local."
            )
        if self.shares not in ("even", "speed") and not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", self.shares):
            raise SpecError(
                f"data: shares must be 'even', 'speed', or one number per worker as in 1+3, found {self.shares!r}."
            )
        if self.shares == "speed":
            self._check_speed()
        if self.between == "none":
            raise SpecError("data: between=none is written exact, which is what it is without the key.")
        if self.compresses and self.via == "chain":
            raise SpecError(
                f"data: via=chain adds up gradients from host to host, but between={self.between} sends them to "
                "all; leave via out."
            )

    def _check_speed(self) -> None:
        """Sizes are decided in shared memory, from the time that each slot takes for itself."""
        if not self.shares_memory or self.via == "chain":
            other = "partition=relay" if self.partition == "relay" else f"via={self.via}"
            other = f"between={self.between}" if self.compresses else other
            raise SpecError(
                f"data: shares=speed measures workers through shared memory, which {other} does not use; use "
                "via=arena, or shares=even."
            )

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed between hosts, so that each step leaves something for the next."""
        return self.between not in ("exact", "bf16")

    @property
    def shares_memory(self) -> bool:
        """Whether the model lies in memory that all workers of a host share, where the host can."""
        return self.via in ("auto", "arena", "chain") and self.partition == "spread" and not self.compresses

    @property
    def counts(self) -> list[int]:
        """The written shares, one per worker; empty where no numbers are written."""
        return [int(count) for count in self.shares.split("+")] if self.shares[0].isdigit() else []

    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        if self.partition == "relay":
            # Every worker computes whole batches, when it is its turn.
            return Conduct(
                fills=(range(slots or 1),) * cluster.places,
                slots_are_free=False,
                is_relay=True,
                protects="samples",
                gathers=cluster.places > 1,
                spans_hosts=True,
                why=dict.fromkeys(
                    ("has_places", "slots"), f"with strategy={self} workers take turns with whole batches"
                ),
            )
        if self.compresses:
            return self._compressed_conduct(cluster, slots)
        why = {
            "has_journal": f"strategy={self} keeps none; leave journal on",
            "spans_hosts": f"strategy={self} sums inside one host; use via=ring, or leave via out",
        }
        on_gpus = cluster.device != "cpu"
        if on_gpus:
            why["has_places"] = f"device={cluster.device} does so with via=arena alone; use that, or leave it out"
            why["meets"] = "on a GPU that workers share they are computed one after the other; use via=backend"
        if self.batchnorm == "sync":
            why["can_skip"] = "batchnorm=sync needs them all in every pass; use batchnorm=local"
            why["has_whole_passes"] = "batchnorm=sync has workers meet inside of it; use batchnorm=local"
        if self.shares == "speed" or self.batchnorm == "sync":
            said = "shares=speed" if self.shares == "speed" else "batchnorm=sync"
            why["protects"] = f"with {said} what a sample changes depends on others; leave that out"
        in_gpu_memory = on_gpus and self.via == "arena"
        if in_gpu_memory:
            why["protects"] = "workers that share a GPU's memory compute no gradients by sample; use via=backend"
        is_protected = not in_gpu_memory and self.shares != "speed" and self.batchnorm != "sync"
        has_places = self.shares_memory and self.via != "chain" and (not on_gpus or self.via == "arena")
        return Conduct(
            fills=self._fills(cluster.places, slots),
            has_places=has_places,
            hosts_several=has_places,
            has_journal=self.journal and self.via != "chain",
            can_skip=self.batchnorm != "sync",
            has_whole_passes=self.batchnorm != "sync",
            meets=self.via != "chain" and not in_gpu_memory,
            synchronises=True,
            protects="samples" if is_protected else "",
            spans_hosts=self.via not in ("arena", "backend"),
            outlives_hosts=self.via == "chain",
            takes_hosts=self.via == "chain" or (self.via == "auto" and self.batchnorm == "local"),
            open_commits=self._open_commits(cluster, slots),
            mixes_devices=self.via == "backend" or self.shares == "speed",
            is_measured_first=cluster.device == MIXED and self.shares == "speed",
            why=why,
        )

    def _open_commits(self, cluster: Cluster, slots: int | None) -> int:
        """One worker runs ahead of its GPU; on a CPU, and with others, each step is known when it is taken."""
        is_alone = cluster.places == (slots or 1) == 1 and self.via == "auto"
        return MOST_AHEAD if is_alone and cluster.device != "cpu" else 1

    def _compressed_conduct(self, cluster: Cluster, slots: int | None) -> Conduct:
        """Every worker keeps what it has not sent yet, and nobody else has that."""
        return Conduct(
            fills=self._fills(cluster.places, slots),
            gathers=cluster.places > 1,
            meets=True,
            synchronises=True,
            can_skip=self.batchnorm != "sync",
            protects="samples",
            spans_hosts=True,
            puts_aside="unsent",
            why=dict.fromkeys(
                ("has_places", "has_journal"), f"with strategy={self} each worker keeps what is not sent yet"
            ),
        )

    def _fills(self, workers: int, slots: int | None) -> tuple[range, ...]:
        """Which slots each worker fills; they add up to `slots`, or to one for each."""
        counts = self.counts
        if not counts:
            return even_fills(slots or workers, workers)
        if len(counts) != workers or sum(counts) != (slots or sum(counts)):
            raise SpecError(
                f"data: shares={self.shares} names {len(counts)} workers and {sum(counts)} slots, "
                f"but the job has {workers} workers and {slots or workers} slots."
            )
        return fills_of(counts)

    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        if self.compresses:
            return Claim.RESULT
        return Claim.BITS if self.via in ("auto", "arena", "chain") and self.between == "exact" else Claim.SUMS

    def check(self, job: Job) -> None:
        cluster = job.cluster
        if self.partition == "relay" and self != Data(partition="relay"):
            raise SpecError(
                f"Job: strategy={self} lets workers take turns with whole batches, which does not go together "
                "with other keys; leave them out."
            )
        if self.shares == "speed" and cluster.device == MIXED:
            if job.slots not in (None, cluster.places) or cluster.max_workers is not None:
                raise SpecError(
                    f"Job: shares=speed with device={MIXED} gives every worker one part of a batch, but "
                    f"slots={job.slots} and workers={cluster.written_workers}; leave slots out, and name a "
                    "number of workers."
                )
        elif self.shares == "speed" and cluster.device != "cpu":
            raise SpecError(
                f"Job: shares=speed measures workers through shared memory, which device={cluster.device} does "
                "not use; use device=cpu, or shares=even."
            )
        if self.between != "exact" and not cluster.is_spread:
            raise SpecError(
                f"Job: between={self.between} is for what travels between hosts, but on={cluster.on} is one host; "
                "leave it out."
            )
        if cluster.device != "cpu":
            self._check_on_gpus(job)

    def _check_on_gpus(self, job: Job) -> None:
        device = job.cluster.device
        if not self.journal and self.via != "arena":
            raise SpecError(
                f"Job: journal=off saves a journal in shared memory, which device={device} uses with via=arena "
                "alone; leave it out."
            )
        if self.via == "chain":
            raise SpecError(
                f"Job: via=chain shares the host's memory, but device={device}; use via=backend on GPUs, or "
                "via=arena where workers share one."
            )
        if self.via == "arena" and self.batchnorm == "sync":
            raise SpecError(
                "Job: batchnorm=sync has slots meet in every pass, but with via=arena on a GPU they are computed "
                "one after the other; use via=backend, or batchnorm=local."
            )
        if self.via == "arena" and job.graph:
            raise SpecError(
                "Job: graph captures a step with its update, but with via=arena others may have to finish it; "
                "leave graph or via out."
            )

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        if run.workers == run.slots == 1 and self.via == "auto" and not run.is_replaceable:
            return whole_footprint(model, run)
        if self.partition == "relay" and run.workers > 1:
            return handed_on(model, run, cut or CutSize())
        if self.via == "arena" and not run.shares_memory:
            return device_footprint(model, run, cut or CutSize())
        if self.shares_memory and run.shares_memory:
            regions = self.segment_regions(model, run, cut or CutSize())
            return arena_footprint(regions, model, run, cut or CutSize())
        return summed_over_sockets(model, run, self.via)

    def segment_regions(self, model: ModelSize, run: RunSize, cut: CutSize) -> tuple[MemoryRegion, ...]:
        """What is reserved in the segment that all workers of a host map."""
        if not self.journal:
            run = replace(run, image=0)
        return arena_regions(
            model,
            run,
            cut,
            follows_speed=self.shares == "speed",
            journals=self.journal,
            is_spread=self.via == "chain",
        )

    def synchronised(self) -> Self:
        return replace(self, batchnorm="sync", shares="even")

    def for_trial(self, steps: int) -> Self:
        return replace(self, via="arena") if self.shares_memory else self

    def across_hosts(self) -> Self:
        if self.via != "auto" or self.partition != "spread" or self.compresses:
            return self
        return replace(self, via="ring" if self.batchnorm == "sync" else "chain")

    def across_devices(self, *, mixed: bool) -> Self:
        return replace(self, via="backend" if mixed else "auto", shares="even")

    def for_inference(self) -> Data:
        """Who fills which part of a batch, and when, is a matter of training."""
        return Data(via="auto" if self.shares_memory or self.compresses else self.via)
