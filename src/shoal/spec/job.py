"""`Job`: one run, as data. It names code, it never carries any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from shoal.errors import SpecError
from shoal.spec.chaos import parse_chaos
from shoal.spec.checkpointing import CheckpointRule
from shoal.spec.checks import require_choice, require_count
from shoal.spec.cluster import MIXED, Cluster
from shoal.spec.conduct import Conduct
from shoal.spec.features import check_job
from shoal.spec.precision import check_precision
from shoal.spec.privacy import OFF, Privacy, check_privacy
from shoal.spec.sampling import Fold
from shoal.spec.step_form import StepForm, check_form
from shoal.spec.strategy import StrategySpec, parse_strategy
from shoal.spec.vocabulary import Purpose

ON_FAILURE = ("auto", "replace", "shrink", "restart", "stop")
OVERRIDES = (
    "batch_size",
    "epochs",
    "max_steps",
    "seed",
    "accumulate",
    "evaluate_every",
    "fold",
    "skip_loss_below",
    "loaders",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: which task, how, where. Plain data that any process can read from JSON."""

    target: str
    """`path.py:factory` or `package.module:factory`; the factory defaults to `task`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory: text, numbers, booleans."""
    purpose: Purpose = Purpose.TRAIN
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
    stay in float32; `auto`: what `fast` finds, fp32 or bf16. Parameters are float32 in any case."""
    recompute: bool = False
    """Whether blocks of the model keep their inputs alone, and are computed again in the backward pass."""
    compile: bool = False
    """Whether forward and backward passes are compiled, once for each shape of a batch."""
    graph: bool = False
    """Whether the whole step is captured on a GPU, and replayed."""
    memory_format: str = "contiguous"
    """How images lie in memory: `contiguous`, or `channels_last`."""
    products: str = "torch"
    """Who multiplies in float32 on a CPU: `torch`'s own choice, or `onednn`."""
    convolutions: str = "torch"
    """How gradients of convolutions' weights are made on a CPU: as `torch` does, or from `patches`."""
    loss_in_pieces: bool = False
    """Whether the scores of a large vocabulary are made and used piece by piece."""
    flat_update: bool = False
    """Whether the weights of linear layers are updated on a GPU in one kernel, from gradients in bf16."""
    offload: str = "none"
    """What of one worker's GPU lies in the host's memory: `none`, or `optimizer`, all that the optimizer keeps."""
    fast: bool = False
    """Whether these, and with `precision=auto` bf16, are tried before the run, and the fastest taken. What was
    chosen takes the place of this in the job that is run."""
    sync_device: bool = False
    """Whether a GPU does one thing after the other, so that errors point at the line that caused them."""
    privacy: str = OFF
    """What the model may tell of its data: `epsilon=8,delta=1e-5`, or `noise=1.1`; `none`: whatever it learns."""
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
        require_choice("Job", "purpose", self.purpose, tuple(Purpose))
        object.__setattr__(self, "purpose", Purpose(self.purpose))
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
        if (privacy := Privacy.parse(self.privacy)) is not None:
            object.__setattr__(self, "privacy", str(privacy.with_key()))
        spec = parse_strategy(self.strategy)
        if self.cluster.is_spread:
            spec = spec.across_hosts()
        object.__setattr__(self, "strategy", str(spec))
        if self.slots is not None:
            require_count("Job", "slots", self.slots)
            if self.slots < self.cluster.places and not self.conduct.is_cut:
                raise SpecError(
                    f"Job: slots={self.slots} is fewer than workers={self.cluster.places}, so some would "
                    "have nothing to do; use at least as many slots as workers."
                )
        if self.cluster.spares and self.purpose != Purpose.TRAIN:
            raise SpecError(f"Job: spares={self.cluster.spares} was set, but only training can use spares; set 0.")
        if self.cluster.is_remote and self.purpose == Purpose.INSPECT:
            raise SpecError(
                f"Job: on={self.cluster.on} is to train, evaluate or predict, but purpose={self.purpose} runs on "
                "this machine; leave it out."
            )
        if self.cluster.is_remote and self.purpose == Purpose.SCRIPT:
            _check_script_elsewhere(self)
        if self.cluster.spares and self.on_failure == "restart":
            raise SpecError(
                f"Job: spares={self.cluster.spares} take the places of workers that die, but on_failure=restart "
                "begins again without them; use on_failure=replace, or no spares."
            )
        if self.cluster.max_workers is not None and self.purpose != Purpose.TRAIN:
            raise SpecError(
                f"Job: workers={self.cluster.written_workers} is for training, but purpose={self.purpose}; give a "
                "number of workers."
            )
        if self.cluster.store and not self.conduct.servers:
            raise SpecError(
                f"Job: store={self.cluster.store} is for a coordinator's decisions, but strategy={self.strategy} "
                "has no coordinator; leave it out, or use ps."
            )
        if self.cluster.device == MIXED and (self.cluster.is_remote or not self.conduct.mixes_devices):
            raise SpecError(
                f"Job: device={MIXED} has workers of one machine go at very different speeds, but "
                f"on={self.cluster.on} and strategy={self.strategy} were asked for; use ps:sync=asp or "
                "data:shares=speed on this machine, or one kind of device."
            )
        check_precision(self)
        check_form(self)
        check_job(self)
        check_privacy(self)
        spec.check(self)
        if self.chaos:
            _check_chaos(self)

    @cached_property
    def conduct(self) -> Conduct:
        """How this job behaves: what everybody asks in place of its strategy's name."""
        return self.spec.conduct(self.cluster, self.slots)

    @cached_property
    def protection(self) -> Privacy | None:
        """What is asked of training for the privacy of its data."""
        return Privacy.parse(self.privacy) if self.purpose == Purpose.TRAIN else None

    @property
    def num_slots(self) -> int:
        """Parts of a global batch."""
        return self.conduct.slots

    @property
    def form(self) -> StepForm:
        """In which form steps run."""
        return StepForm(
            compile=self.compile,
            graph=self.graph,
            memory_format=self.memory_format,
            products=self.products,
            convolutions=self.convolutions,
            loss_in_pieces=self.loss_in_pieces,
            flat_update=self.flat_update,
            offload=self.offload,
        )

    @property
    def own_slots(self) -> int:
        """As many as there would be if nobody asked for any number."""
        return self.spec.conduct(self.cluster).slots

    @property
    def replaces(self) -> bool:
        """Whether others take the places of those that die, where the strategy lets them."""
        return self.on_failure in ("auto", "replace", "shrink")

    @property
    def restarts(self) -> bool:
        """Whether the run begins again by itself where nobody took the place of one that died."""
        return self.on_failure == "restart" or (self.on_failure == "auto" and self.checkpoint != "none")

    @cached_property
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


def _check_chaos(job: Job) -> None:
    """Faults are for training, and for processes that the job has."""
    chaos = parse_chaos(job.chaos)
    if job.purpose != Purpose.TRAIN:
        raise SpecError(f"Job: chaos={job.chaos!r} is for training, but purpose={job.purpose}; leave it out.")
    chaos.check_against(workers=job.cluster.places, servers=job.conduct.servers)
    object.__setattr__(job, "chaos", str(chaos))


def _check_script_elsewhere(job: Job) -> None:
    """Scripts on several hosts are workers, as many from the beginning to the end."""
    if job.conduct.servers:
        raise SpecError(
            f"Job: on={job.cluster.on} starts a script's workers on several hosts, but the servers of "
            f"strategy={job.strategy} would share one host's memory with them; make the model a task and train "
            "it, or leave one of the two out."
        )
    if job.cluster.hosts:
        raise SpecError(
            f"Job: hosts={job.cluster.hosts} lets hosts come and go, which a script would not notice; leave it "
            "out."
        )
