"""`Job`: one run, as data. It names code, it never carries any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count
from shoal.spec.cluster import Cluster
from shoal.spec.strategy import Data, ParameterServer, StrategySpec, parse_strategy
from shoal.spec.update_path import check_update_path

PURPOSES = ("train", "evaluate", "predict", "inspect", "script")
OVERRIDES = ("batch_size", "epochs", "max_steps", "seed", "accumulate", "evaluate_every")


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
    """Fields of the task that this run changes."""
    run_dir: str = ""
    """Where the run keeps its events, logs, model and report."""
    numerics: str = "task"
    """`task`, or `float64`: everything in double precision, dropout off, for exact comparisons."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What one purpose alone needs: which data to predict, where to write, a script's arguments."""

    def __post_init__(self) -> None:
        require_choice("Job", "purpose", self.purpose, PURPOSES)
        require_choice("Job", "numerics", self.numerics, ("task", "float64"))
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
        spec = parse_strategy(self.strategy)
        object.__setattr__(self, "strategy", str(spec))
        if self.slots is not None:
            require_count("Job", "slots", self.slots)
            if self.slots < self.cluster.workers:
                raise SpecError(
                    f"Job: slots={self.slots} is fewer than workers={self.cluster.workers}, so some would "
                    "have nothing to do; use at least as many slots as workers."
                )
        if self.cluster.spares and self.purpose != "train":
            raise SpecError(f"Job: spares={self.cluster.spares} was set, but only training can use spares; set 0.")
        if isinstance(spec, Data):
            spec.slots_per_worker(self.num_slots, self.cluster.workers)
            _check_arena(spec, self.cluster)
        elif isinstance(spec, ParameterServer):
            _check_served(spec, self)

    @property
    def num_slots(self) -> int:
        """Parts of a global batch."""
        if self.slots is not None:
            return self.slots
        spec = self.spec
        if isinstance(spec, ParameterServer):
            return self.cluster.workers * spec.cells_per_worker
        return sum(spec.counts) if isinstance(spec, Data) and spec.counts else self.cluster.workers

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
    if spec.via == "arena" and cluster.device != "cpu":
        raise SpecError(
            f"Job: via=arena shares the host's memory, but device={cluster.device}; use via=backend on GPUs."
        )


def _check_served(spec: ParameterServer, job: Job) -> None:
    """What a parameter server cannot do, and what contradicts itself."""
    cluster, slots = job.cluster, job.num_slots
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
