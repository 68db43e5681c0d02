"""`Job`: one run, as data. It names code, it never carries any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal.errors import SpecError
from shoal.spec.chaos import parse_chaos
from shoal.spec.checkpointing import CheckpointRule
from shoal.spec.checks import require_choice, require_count
from shoal.spec.cluster import Cluster
from shoal.spec.layerwise import Layer
from shoal.spec.model_parallel import ModelParallel, as_mesh
from shoal.spec.precision import check_precision
from shoal.spec.sampling import Fold
from shoal.spec.strategy import Data, ParameterServer, StrategySpec, parse_strategy
from shoal.spec.update_path import check_update_path

ON_FAILURE = ("auto", "replace", "shrink", "restart", "stop")
PURPOSES = ("train", "evaluate", "predict", "inspect", "script")
OVERRIDES = (
    "batch_size",
    "epochs",
    "max_steps",
    "seed",
    "accumulate",
    "evaluate_every",
    "fold",
    "skip_loss_below",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: which task, how, where. Plain data that any process can read from JSON."""

    target: str
    """`path.py:factory` or `package.module:factory`; the factory defaults to `task`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory: text, numbers, booleans."""
    purpose: str = "train"
    strategy: str = "data"
    """The written form of the strategy."""
    cluster: Cluster = field(default_factory=Cluster)
    slots: int | None = None
    """Parts of a global batch; default one per worker. The same slots give the same bits on any workers."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the task that this run changes; `fold`: which part of the train set it tests on, as `2/5`."""
    run_dir: str = ""
    """Where the run keeps its events, logs, model and report."""
    numerics: str = "task"
    """`task`, or `float64`: everything in double precision, dropout off, for exact comparisons."""
    precision: str = "fp32"
    """What models compute in: `fp32`, `bf16`, `fp16`, or `adaptive`: layers that half precision is too small for
    stay in float32. Parameters are float32 in any case."""
    recompute: bool = False
    """Whether blocks of the model keep their inputs alone, and are computed again in the backward pass."""
    chaos: str = ""
    """Faults to inject: `kill worker:1 at step 50; slow worker:0 x4`, or `random:mtbf=10s`."""
    checkpoint: str = "none"
    """When to save the training state: `every=200`, `every=5m`, `auto`; `,keep=3`."""
    on_failure: str = "auto"
    """What follows the death of a worker: `replace` (a spare, or a fresh process, takes its place), `shrink` (the
    other workers do its work, too), `restart` (all begin again from the newest checkpoint, or from the start) or
    `stop`. `auto`: replace; where nobody can take the place and there are checkpoints, restart."""
    max_failures: int = 10
    """So many deaths and errors of processes a run survives within a minute, and so many restarts without a new
    checkpoint; one more ends it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What one purpose alone needs: which data to predict, where to write, a script's arguments. For measurements:
    `timeline` (a file of when each step was done) and `quiet` (no beats, no events but the last ones, no book)."""

    def __post_init__(self) -> None:
        require_choice("Job", "purpose", self.purpose, PURPOSES)
        require_choice("Job", "numerics", self.numerics, ("task", "float64"))
        require_choice("Job", "on_failure", self.on_failure, ON_FAILURE)
        require_count("Job", "max_failures", self.max_failures, least=0)
        if not self.target:
            raise SpecError("Job: target is empty; write path.py:factory, for instance digits.py:task.")
        for kind, values in (("args", self.args), ("overrides", self.overrides), ("options", self.options)):
            try:
                json.dumps(dict(values))
            except (TypeError, ValueError) as error:
                raise SpecError(
                    f"Job: {kind} must be plain data (text, numbers, booleans, lists), found {error}."
                ) from None
        for name in self.overrides:
            if name not in OVERRIDES:
                raise SpecError(f"Job: {name!r} cannot be overridden; only {', '.join(OVERRIDES)} can.")
        if "fold" in self.overrides:
            Fold.parse(self.overrides["fold"])
        object.__setattr__(self, "checkpoint", str(CheckpointRule.parse(self.checkpoint)))
        spec = parse_strategy(self.strategy)
        object.__setattr__(self, "strategy", str(spec))
        if self.slots is not None:
            require_count("Job", "slots", self.slots)
            if self.slots < self.cluster.places and not _cuts_model(spec):
                raise SpecError(
                    f"Job: slots={self.slots} is fewer than workers={self.cluster.places}, so some would "
                    "have nothing to do; use at least as many slots as workers."
                )
        if self.cluster.spares and self.purpose != "train":
            raise SpecError(f"Job: spares={self.cluster.spares} was set, but only training can use spares; set 0.")
        if self.cluster.spares and self.on_failure == "restart":
            raise SpecError(
                f"Job: spares={self.cluster.spares} take the places of workers that die, but on_failure=restart "
                "begins again without them; use on_failure=replace, or no spares."
            )
        if isinstance(spec, Data):
            spec.slots_per_worker(self.num_slots, self.cluster.places)
            _check_relay(spec, self)
            _check_arena(spec, self.cluster)
            _check_moves(spec, self)
        elif isinstance(spec, ParameterServer):
            _check_served(spec, self)
        elif isinstance(spec, ModelParallel):
            _check_cut(spec, self)
        elif isinstance(spec, Layer):
            _check_layers(spec, self)
        check_precision(spec, self)
        if self.chaos:
            _check_chaos(spec, self)

    @property
    def num_slots(self) -> int:
        """Parts of a global batch."""
        if self.slots is not None:
            return self.slots
        spec = self.spec
        if isinstance(spec, ParameterServer):
            return self.cluster.workers * spec.cells_per_worker
        if isinstance(spec, ModelParallel):
            return as_mesh(spec, self.cluster.places).lanes
        if isinstance(spec, Layer) and spec.cuts_model:
            return 1
        if isinstance(spec, Data) and spec.partition == "relay":
            return 1
        return sum(spec.counts) if isinstance(spec, Data) and spec.counts else self.cluster.places

    @property
    def replaces(self) -> bool:
        """Whether others take the places of those that die, where the strategy lets them."""
        return self.on_failure in ("auto", "replace", "shrink")

    @property
    def restarts(self) -> bool:
        """Whether the run begins again by itself where nobody took the place of one that died."""
        return self.on_failure == "restart" or (self.on_failure == "auto" and self.checkpoint != "none")

    @property
    def spec(self) -> StrategySpec:
        """The strategy as its dataclass."""
        return parse_strategy(self.strategy)

    def to_json(self) -> str:
        """This job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        try:
            values = json.loads(text)
            values["cluster"] = Cluster(**values["cluster"])
            return cls(**{key: value for key, value in values.items() if key in {f.name for f in fields(cls)}})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise SpecError(f"Job: this is not a job written by Shoal ({error}).") from None


def _check_relay(spec: Data, job: Job) -> None:
    """Where workers take turns with whole batches, there is nothing to cut or to sum."""
    if spec.partition != "relay":
        return
    asked = {
        "other keys": spec != Data(partition="relay"),
        "slots": job.slots is not None,
        "spares": job.cluster.spares,
        "limits of workers": job.cluster.max_workers is not None,
        "on_failure=shrink": job.on_failure == "shrink",
    }
    if wrong := [name for name, is_set in asked.items() if is_set]:
        raise SpecError(
            f"Job: strategy={spec} lets workers take turns with whole batches, which does not go together with "
            f"{', '.join(wrong)}; leave them out."
        )


def _check_arena(spec: Data, cluster: Cluster) -> None:
    """What only shared memory can do, and what it cannot."""
    if cluster.spares and (spec.via not in ("auto", "arena") or cluster.device != "cpu"):
        raise SpecError(
            f"Job: spares={cluster.spares} take a dead worker's place in shared memory, which strategy={spec} on "
            f"{cluster.device} does not use; use data:via=arena on cpu, or no spares."
        )
    if cluster.spares and not spec.journal:
        raise SpecError(
            f"Job: spares={cluster.spares} finish a dead worker's step from its journal, but strategy={spec} "
            "keeps none; leave journal on, or use no spares."
        )
    if spec.shares == "speed" and cluster.device != "cpu":
        raise SpecError(
            f"Job: shares=speed measures workers through shared memory, which device={cluster.device} does not "
            "use; use device=cpu, or shares=even."
        )
    if spec.via == "arena" and cluster.device != "cpu":
        raise SpecError(
            f"Job: via=arena shares the host's memory, but device={cluster.device}; use via=backend on GPUs."
        )


def _check_moves(spec: Data, job: Job) -> None:
    """One process can do the work of several workers in shared memory alone, and at its own pace."""
    cluster = job.cluster
    asked = "on_failure=shrink" if job.on_failure == "shrink" else ""
    if cluster.max_workers is not None:
        asked = f"workers={cluster.written_workers}"
    if not asked:
        return
    if job.purpose != "train":
        raise SpecError(f"Job: {asked} is for training, but purpose={job.purpose}; give a number of workers.")
    if spec.via not in ("auto", "arena") or cluster.device != "cpu" or not spec.journal:
        raise SpecError(
            f"Job: {asked} lets a worker do the work of another in shared memory, with its journal, which "
            f"strategy={spec} on {cluster.device} does not use; use data:via=arena on cpu."
        )
    if spec.batchnorm == "sync":
        raise SpecError(
            f"Job: {asked} lets a worker do the work of another, but batchnorm=sync needs a process of its own "
            "for every slot; use batchnorm=local, or on_failure=replace and a fixed number of workers."
        )


def _cuts_model(spec: StrategySpec) -> bool:
    """Whether each worker holds a part of the model."""
    return isinstance(spec, ModelParallel) or (isinstance(spec, Layer) and spec.cuts_model)


def _moves_asked(job: Job) -> list[str]:
    """What takes processes that can take each other's place."""
    asked = {
        "spares": job.cluster.spares,
        "limits of workers": job.cluster.max_workers is not None,
        "on_failure=shrink": job.on_failure == "shrink",
    }
    return [name for name, is_set in asked.items() if is_set]


def _check_layers(spec: Layer, job: Job) -> None:
    """Layers that are placed, decoupled, or take turns."""
    spec.check_workers(job.cluster.places)
    if spec.cuts_model:
        _check_cut(spec, job)
    elif wrong := _moves_asked(job):
        raise SpecError(
            f"Job: strategy={spec} sums gradients over sockets and cannot replace workers, which does not go "
            f"together with {', '.join(wrong)}; leave them out; resume where one is lost."
        )


def _check_cut(spec: ModelParallel | Layer, job: Job) -> None:
    """Where each worker holds a part of the model, nobody can take another's place."""
    lanes = 1 if isinstance(spec, Layer) else as_mesh(spec, job.cluster.places).lanes
    if wrong := _moves_asked(job):
        raise SpecError(
            f"Job: with strategy={spec} each worker holds a part of the model that nobody else has, which does "
            f"not go together with {', '.join(wrong)}; leave them out; resume where one is lost."
        )
    if job.slots not in (None, lanes):
        raise SpecError(
            f"Job: slots={job.slots}, but strategy={spec} cuts every batch into {lanes}, one part for each line "
            "of workers; leave slots out."
        )


def _check_chaos(spec: StrategySpec, job: Job) -> None:
    """Faults are for training, and for processes that the job has."""
    chaos = parse_chaos(job.chaos)
    if job.purpose != "train":
        raise SpecError(f"Job: chaos={job.chaos!r} is for training, but purpose={job.purpose}; leave it out.")
    servers = spec.num_servers if isinstance(spec, ParameterServer) else 0
    chaos.check_against(workers=job.cluster.places, servers=servers)
    object.__setattr__(job, "chaos", str(chaos))


def _check_served(spec: ParameterServer, job: Job) -> None:
    """What a parameter server cannot do, and what contradicts itself."""
    cluster, slots = job.cluster, job.num_slots
    if cluster.max_workers is not None:
        raise SpecError(
            f"Job: workers={cluster.written_workers} is for strategy data; start strategy={spec} with a number, "
            "and change it with shoal scale."
        )
    if job.on_failure == "shrink":
        raise SpecError(
            f"Job: on_failure=shrink lets a worker do the work of another in shared memory, but strategy={spec} "
            "replaces those that die; use replace or stop."
        )
    if cluster.spares:
        raise SpecError(
            f"Job: spares={cluster.spares} was set, but strategy={spec} replaces workers and servers that die by "
            "itself; set 0."
        )
    if cluster.device != "cpu":
        raise SpecError(f"Job: strategy={spec} runs on the CPU, but device={cluster.device}; use device=cpu.")
    follows_speed = spec.sync == "asp" or (spec.sync.startswith("ssp:") and not spec.is_lockstep)
    if spec.shares == "speed" and not follows_speed:
        raise SpecError(
            f"Job: shares=speed lets faster workers take more of the data, which sync={spec.sync} cannot; "
            "use asp or ssp:N."
        )
    if slots != cluster.workers * spec.cells_per_worker and not spec.is_lockstep:
        raise SpecError(
            f"Job: slots={slots} for {cluster.workers} workers, but with sync={spec.sync} every worker has one "
            "part of its own; leave slots out, or use sync=bsp."
        )
    if spec.sync.startswith("quorum:") and spec.sync.split("/")[1] != str(cluster.workers):
        raise SpecError(
            f"Job: sync={spec.sync} counts {spec.sync.split('/')[1]} workers, but there are {cluster.workers}; "
            f"write quorum:k/{cluster.workers}."
        )
    check_update_path(spec, cluster.workers)
