"""Strategies that cut the model: by its state, by the width of its layers, by its depth, or several at once.

`sharded`, `tensor` and `pipeline` are each a mesh with one axis; everybody below works with the `Mesh`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count
from shoal.spec.cluster import Cluster
from shoal.spec.conduct import Claim, Conduct, Width
from shoal.spec.cut_footprint import cut_footprint
from shoal.spec.footprint import Footprint
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.strategy import Only, StrategySpec

if TYPE_CHECKING:
    from shoal.spec.job import Job

AXES = ("data", "shard", "pipeline", "tensor")
"""From the one that sends least to the one that sends most: neighbours by rank are neighbours in the last."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
POLICIES = ("size", "count", "layer", "device")
NORMS = ("auto", "sequence", "replicated")
NOBODY_ELSE = "each worker holds a part of the model that nobody else has; leave it out; resume where one is lost"


@dataclass(frozen=True, kw_only=True)
class ModelParallel(StrategySpec):
    """What all of them have in common: they behave as the mesh does that they are."""

    made_by: ClassVar[str] = "shoal.strategies.mesh:make"
    cut_by: ClassVar[str] = "shoal.strategies.mesh.sizes:cut_size"
    tried_by: ClassVar[str] = "shoal.strategies.mesh.trying:try_cut"
    VIA: ClassVar[tuple[str, ...]] = ("auto", "memory", "backend")

    via: str = "auto"
    """How workers talk: through shared memory (`memory`, the default on CPUs), or torch's own collectives
    (`backend`, the default on GPUs)."""

    def __post_init__(self) -> None:
        require_choice(self.name, "via", self.via, self.VIA)

    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        mesh = as_mesh(self, cluster.places)
        lanes = [mesh.lane_of(rank) for rank in range(cluster.places)]
        return Conduct(
            fills=tuple(range(lane, lane + 1) for lane in lanes),
            slots_are_free=False,
            is_cut=mesh.num_workers > mesh.data,
            has_whole_passes=False,
            has_copies=mesh.data > 1,
            is_never_whole=True,
            gathers=True,
            frees_parameters=mesh.shard > 1 and mesh.level == 3 and not mesh.shares_memory(cluster),
            spans_hosts=self.via == "auto" and cluster.device == "cpu",
            repeats_passes=mesh.schedule != "zero-bubble",
            meets=mesh.pipeline == 1,
            synchronises=mesh.pipeline == 1,
            can_skip=False,
            calls_model=mesh.pipeline == 1,
            microbatches=mesh.num_microbatches,
            draws_otherwise=mesh.pipeline * mesh.tensor > 1,
            width=Width(count=mesh.tensor, plan=mesh.plan, norms=mesh.norms) if mesh.tensor > 1 else None,
            preprocess=mesh.preprocess,
            why={
                "has_places": f"strategy={self} cannot replace workers"
                if mesh.data > 1
                else f"with strategy={self} {NOBODY_ELSE}",
                "slots": f"strategy={self} cuts every batch into {mesh.lanes}, one part for each lane of workers",
                "meets": f"with strategy={self} they follow each other through the model",
                "repeats_passes": "schedule=zero-bubble takes that pass in two parts; use schedule=1f1b",
            },
        )

    @property
    def asked_workers(self) -> int:
        """How many workers what is written is for; 0: for any number."""
        return 0

    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        return Claim.SUMS

    def check(self, job: Job) -> None:
        if self.via == "memory" and job.cluster.device != "cpu":
            raise SpecError(
                f"Job: via=memory shares the host's memory, but device={job.cluster.device}; leave it out on GPUs."
            )
        if as_mesh(self, job.cluster.places).offload and job.cluster.device == "cpu":
            raise SpecError(
                f"Job: strategy={self} keeps in the host's memory what would lie on a GPU, but device=cpu; leave "
                "offload out, or use device=cuda."
            )

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        return cut_footprint(as_mesh(self, run.workers), model, run, cut or CutSize())


@dataclass(frozen=True, kw_only=True)
class Sharded(ModelParallel):
    """Data parallel in which each worker keeps only its part of optimizer state, gradients and parameters."""

    name: ClassVar[str] = "sharded"

    stage: int = 3
    """What is cut: 1: the optimizer's state; 2: gradients, too; 3: parameters, too."""
    policy: str = "size"
    """How: by `size`; by `count` of whole parameters; whole `layer`s; by `device`: as `capacities` say."""
    capacities: str = "even"
    """With policy=device: how much each worker can hold, as in `2+1`."""
    offload: bool = False
    """Keep the optimizer's state and, between uses, parameters in the host's memory; for GPUs."""
    batchnorm: str = "local"
    """`local`: each worker normalises by its own part of the batch; `sync`: by the whole batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sharding(self.name, self.stage, self.policy, self.capacities)
        require_choice(self.name, "batchnorm", self.batchnorm, ("local", "sync"))

    def synchronised(self) -> Self:
        return replace(self, batchnorm="sync")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(ModelParallel):
    """Every worker computes with its part of each layer's width, on the whole batch."""

    name: ClassVar[str] = "tensor"

    plan: str = "auto"
    """`auto`, or which layer is cut how: `blocks.*.up=column;blocks.*.down=row;head=vocabulary`."""
    norms: str = "auto"
    """Norms between cut layers: of a part of the `sequence` each worker, `replicated`, or as it pays: `auto`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plan(self.name, self.plan)
        require_choice(self.name, "norms", self.norms, NORMS)


@dataclass(frozen=True, kw_only=True)
class Pipeline(ModelParallel):
    """Every worker has some of the layers; parts of the batch follow each other through them."""

    name: ClassVar[str] = "pipeline"

    schedule: str = "1f1b"
    """In which order parts go forward and back: `gpipe`, `1f1b`, `interleaved` or `zero-bubble`."""
    microbatches: int = 0
    """Parts of the batch; 0: twice as many as there are stages."""
    per_worker: int = 0
    """Stages of each worker; 0: 2 where they are interleaved, else 1."""
    split: str = "auto"
    """`auto`: by measured cost; or how many of the model's children each stage has, as in `3+2+3`."""
    preprocess: int = 0
    """Processes of each worker that read and prepare samples beside it; 0: it does so itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pipeline(self.name, self.schedule, self.microbatches, self.per_worker, self.split)
        require_count(self.name, "preprocess", self.preprocess, least=0)


@dataclass(frozen=True, kw_only=True)
class Mesh(ModelParallel):
    """Several ways at once, each along one axis of a grid of workers; the product of the sizes is their number."""

    name: ClassVar[str] = "mesh"
    only: ClassVar[Mapping[str, Only]] = {
        **dict.fromkeys(
            ("stage", "policy", "capacities", "offload"), Only(lambda mesh: mesh.shard > 1, "with shard=2 or more")
        ),
        **dict.fromkeys(
            ("schedule", "microbatches", "per_worker", "split"),
            Only(lambda mesh: mesh.pipeline > 1, "with pipeline=2 or more"),
        ),
        **dict.fromkeys(("plan", "norms"), Only(lambda mesh: mesh.tensor > 1, "with tensor=2 or more")),
        "batchnorm": Only(lambda mesh: mesh.lanes > 1, "with data=2 or shard=2, or more"),
    }

    data: int = 1
    """Copies of all that follows, each with its part of the batch."""
    shard: int = 1
    """Parts of the state, each with its part of the batch."""
    pipeline: int = 1
    """Parts of the depth."""
    tensor: int = 1
    """Parts of the width."""
    stage: int = 3
    policy: str = "size"
    capacities: str = "even"
    offload: bool = False
    plan: str = "auto"
    norms: str = "auto"
    schedule: str = "1f1b"
    microbatches: int = 0
    per_worker: int = 0
    split: str = "auto"
    batchnorm: str = "local"
    preprocess: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in AXES:
            require_count(self.name, axis, getattr(self, axis))
        _check_sharding(self.name, self.stage, self.policy, self.capacities)
        check_plan(self.name, self.plan)
        require_choice(self.name, "norms", self.norms, NORMS)
        _check_pipeline(self.name, self.schedule, self.microbatches, self.per_worker, self.split)
        require_choice(self.name, "batchnorm", self.batchnorm, ("local", "sync"))
        require_count(self.name, "preprocess", self.preprocess, least=0)
        if self.batchnorm == "sync" and self.pipeline > 1:
            raise SpecError(
                f"mesh: batchnorm=sync normalises by the whole batch, but with pipeline={self.pipeline} its parts "
                "pass a layer one after the other; leave batchnorm out, or use no pipeline."
            )

    def synchronised(self) -> Self:
        return replace(self, batchnorm="sync")

    @property
    def sizes(self) -> tuple[int, ...]:
        """How long each of `AXES` is."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_workers(self) -> int:
        """How many workers the grid has."""
        return self.data * self.shard * self.pipeline * self.tensor

    @property
    def asked_workers(self) -> int:
        return self.num_workers

    @property
    def lanes(self) -> int:
        """Parts of the batch: workers of one lane all work on the same one."""
        return self.data * self.shard

    @property
    def level(self) -> int:
        """How much the `shard` axis cuts: what users call `stage`, as ZeRO does; here stages are a pipeline's."""
        return self.stage

    def shares_memory(self, cluster: Cluster) -> bool:
        """Whether workers share their state in the host's memory, where the machine can."""
        is_one = cluster.memory_bytes is None and not cluster.is_spread
        return self.via != "backend" and cluster.device == "cpu" and is_one

    def lane_of(self, rank: int) -> int:
        """The lane that a worker belongs to."""
        return rank // (self.pipeline * self.tensor)

    @property
    def stages_per_worker(self) -> int:
        """Stages of the pipeline at each worker."""
        return self.per_worker or (2 if self.schedule == "interleaved" else 1)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pipeline * self.stages_per_worker

    @property
    def num_microbatches(self) -> int:
        """Parts of a lane's batch that follow each other through the pipeline; 1 where there is none."""
        if self.pipeline == 1:
            return 1
        return self.microbatches or 2 * self.num_stages


def as_mesh(spec: ModelParallel, workers: int) -> Mesh:
    """The grid that a strategy is on so many workers."""
    if not isinstance(spec, Mesh):
        axis = {"sharded": "shard"}.get(spec.name, spec.name)
        keys: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
        spec = Mesh(**keys | {axis: workers})
    elif spec.num_workers != workers:
        written = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, spec.sizes, strict=True) if size > 1)
        raise SpecError(
            f"mesh: {written or 'data=1'} is a grid of {spec.num_workers} workers, but the job has {workers}; "
            f"use --workers {spec.num_workers}, or other sizes."
        )
    if spec.policy == "device" and len(spec.capacities.split("+")) != spec.shard:
        raise SpecError(
            f"{spec.name}: policy=device needs one capacity for each of the {spec.shard} workers that share the "
            f"state, found capacities={spec.capacities}; write for instance "
            f"capacities={'+'.join(['2', *['1'] * (spec.shard - 1)])}."
        )
    return spec


def _check_sharding(name: str, stage: int, policy: str, capacities: str) -> None:
    require_choice(name, "stage", str(stage), ("1", "2", "3"))
    require_choice(name, "policy", policy, POLICIES)
    if capacities != "even" and not re.fullmatch(r"\d+(\.\d+)?(\+\d+(\.\d+)?)*", capacities):
        raise SpecError(
            f"{name}: capacities must be 'even' or one number per worker as in 2+1, found {capacities!r}."
        )
    if (capacities != "even") != (policy == "device"):
        raise SpecError(
            f"{name}: capacities={capacities} and policy={policy} do not go together; policy=device cuts by "
            "capacities, the others evenly."
        )


PLAN_KINDS = ("column", "row", "heads", "vocabulary", "channels", "sequence", "whole")


def check_plan(name: str, plan: str) -> None:
    """A plan is `auto`, or `pattern=kind` parted by semicolons."""
    for item in [] if plan == "auto" else plan.split(";"):
        pattern, equals, kind = item.partition("=")
        if not pattern or not equals:
            raise SpecError(f"{name}: plan must be auto or like blocks.*.up=column;head=row, found {item!r}.")
        require_choice(name, f"plan of {pattern}", kind, PLAN_KINDS)


def _check_pipeline(name: str, schedule: str, microbatches: int, per_worker: int, split: str) -> None:
    require_choice(name, "schedule", schedule, SCHEDULES)
    require_count(name, "microbatches", microbatches, least=0)
    require_count(name, "per_worker", per_worker, least=0)
    if schedule == "interleaved" and per_worker == 1:
        raise SpecError(
            f"{name}: schedule=interleaved needs several stages per worker, found per_worker=1; use 2."
        )
    if split != "auto" and not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", split):
        raise SpecError(f"{name}: split must be 'auto' or a number per stage as in 3+2+3, found {split!r}.")
