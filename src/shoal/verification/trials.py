"""Runs made only to be compared: short, in a folder that is gone afterwards."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, start_zygote
from shoal.launch.supervisor import inspect_task, run_job
from shoal.ledger.book import CutLog
from shoal.observe import Event
from shoal.observe.happenings import CutsChanged, Restarted, Resumed, StepsTaken
from shoal.spec import Job

if TYPE_CHECKING:
    from shoal.verification.difference import Tensors

Progress = Callable[[int, int, str], None]
"""Takes (number, total, what is run now)."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What inspection found out about a task."""

    trained: tuple[str, ...]
    untrained: tuple[str, ...]
    buffers: tuple[str, ...]
    optimizer: str
    num_samples: int
    seed: int
    batch_size: int
    batch_per_worker: bool
    accumulate: int
    has_batchnorm: bool
    """Some layers normalise by the batch, when training; not where all are frozen."""
    initial_loss: float
    """Of the first batch, before any step."""
    repeatable: bool
    """The same samples and random numbers gave the same loss twice."""
    random: bool
    """Other random numbers give another loss: dropout, augmentation."""
    random_in_float64: bool
    """The same with dropout off: only augmentation, or dropout that is never off."""
    narrows: bool = False
    """Parts of the task compute in fewer digits than float64, whatever numbers the model has."""
    why_no_float64: str = ""
    """Why the task cannot be computed in float64; empty where it can."""
    why_no_mean: str = ""
    """Why the loss of a batch is not the mean of its parts', and what to set; empty where it is."""

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Facts:
        """The facts among all that inspection found."""
        values = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        return cls(**values | {name: tuple(values[name]) for name in ("trained", "untrained", "buffers")})

    def global_batch(self, workers: int) -> dict[str, int]:
        """The override with which one process trains on the batch of so many workers."""
        return {"batch_size": self.batch_size * workers} if self.batch_per_worker else {}

    def synchronised_batch(self, workers: int) -> dict[str, int]:
        """The overrides with which all workers have a part of every batch, the last of an epoch included, and
        none is cut further: what it takes for BatchNorm over the whole batch to be that of one process."""
        overrides = {"accumulate": 1}
        if not self.batch_per_worker:
            sizes = range(self.batch_size, workers - 1, -1)
            rests = ((size, self.num_samples % size) for size in sizes)
            fitting = (size for size, rest in rests if rest == 0 or rest >= workers)
            overrides["batch_size"] = next(fitting, self.batch_size)
        return overrides


@dataclass(frozen=True)
class Trial:
    """A finished trial run."""

    folder: Path
    steps: int
    digest: str
    cuts: CutLog
    """How its batches were cut, where that followed speed."""
    skipped: int = 0
    """Steps that changed nothing, because a gradient was no number in half precision."""

    def model(self) -> Tensors:
        """Parameters and buffers."""
        return _load(self.folder / "model.safetensors")

    def state(self) -> Tensors:
        """The optimizer's state, as `parameter/key`."""
        return _load(self.folder / "state.safetensors")


class Laboratory:
    """Runs jobs one after the other and keeps what they leave until it closes."""

    def __init__(self, folder: Path, zygote: ZygoteProcess | None, num_trials: int, progress: Progress) -> None:
        self._folder = folder
        self._zygote = zygote
        self.num_trials = num_trials
        """How many runs there will be, for the progress line."""
        self._progress = progress
        self._done = 0

    def inspect(self, job: Job) -> tuple[Facts, Tensors]:
        """What the job's task is made of, and its initial model."""
        folder = self._begin("inspecting the task")
        facts = Facts.from_plain(inspect_task(job, folder, self._zygote))
        return facts, _load(folder / "model.safetensors")

    def train(self, label: str, job: Job) -> Trial:
        """Train as the job says."""
        folder = self._begin(label)
        # Without evaluations, which cost time and could end the run before its time.
        options: dict[str, Any] = {"state": str(folder / "state.safetensors"), "evaluate": False}
        if "cuts" in job.options:
            options["cuts"] = job.options["cuts"]
        events: list[Event] = []
        results = self._run(replace(job, run_dir=str(folder), options=options), events.append)
        return Trial(
            folder,
            int(results["steps"]),
            str(results["digest"]),
            told_cuts(events),
            skipped=int(results.get("skipped_steps", 0)),
        )

    def watch(self, label: str, job: Job, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Train as the job says, and tell of everything that happens; its results."""
        options = {**job.options, "callbacks": False}  # nothing happens to a job of the user's
        return self._run(replace(job, run_dir=str(self._begin(label)), options=options), on_event)

    def _begin(self, label: str) -> Path:
        self._done += 1
        self._progress(self._done, self.num_trials, label)
        folder = self._folder / str(self._done)
        folder.mkdir()
        return folder

    def _run(self, job: Job, on_event: Callable[[Event], None] = lambda event: None) -> dict[str, Any]:
        return run_job(job, on_event, self._zygote)


@contextmanager
def open_laboratory(
    num_trials: int, zygote: ZygoteProcess | None = None, progress: Progress | None = None
) -> Iterator[Laboratory]:
    """A place for so many runs; all share one zygote, a private one where none is given."""
    with ExitStack() as stack:
        if zygote is None and not os.environ.get(ZYGOTE_VARIABLE):
            zygote = stack.enter_context(start_zygote())
        # Comparing needs torch, which takes as long to import as the first runs take to train.
        threading.Thread(target=import_module, args=("shoal.verification.difference",), daemon=True).start()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-verify-"))
        yield Laboratory(Path(folder), zygote, num_trials, progress or (lambda number, total, label: None))


def told_cuts(events: Iterable[Event]) -> CutLog:
    """How a run cut its batches, as its events tell.

    An attempt that goes on after a step tells first how it cuts the next one; that it goes on there may be told
    later, though before any of its steps.
    """
    log, told = CutLog(), set[int]()
    for event in events:
        match event.what:
            case CutsChanged(from_step=from_step, sizes=sizes):
                log.note(from_step, sizes)
                told.add(from_step)
            case StepsTaken():
                told.clear()
            case Resumed(step=step) | Restarted(step=step) if step + 1 not in told:
                log.note(step + 1, log.at(step))
    return log


def _load(path: Path) -> Tensors:
    from shoal.checkpoint.model_file import load_tensors

    return load_tensors(path)
