"""Training runs, as the command line and Python start them: folder, observers, processes, report."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from shoal.errors import DiskRefused, Interrupted, ShoalError, SpecError, WorkerFailed
from shoal.launch.attempts import Attempts
from shoal.launch.control import request_scale
from shoal.launch.inside import refuse_inside
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import find_whole, first_options, left_out, resumed_job
from shoal.observe import (
    Bus,
    Event,
    FolderWatch,
    JsonlSink,
    PlainSink,
    ProgressSink,
    RunFolder,
    Sink,
    TensorBoardSink,
    write_report,
)
from shoal.observe.checkpoint_names import find_run, folder_name, is_checkpoint, step_folders, step_of
from shoal.observe.run_folder import DEFAULT_ROOT
from shoal.observe.run_lock import RunLock
from shoal.observe.trust import trusted_job
from shoal.observe.wording import near
from shoal.observe.worker_scales import WorkerScales
from shoal.spec import Cluster, Job, StrategySpec


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    results: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """One name for the trained model."""
        return str(self.results["digest"])


def train(
    target: str | Callable[..., Any] | None = None,
    *,
    workers: int | str | None = None,
    strategy: str | StrategySpec | None = None,
    cluster: Cluster | Mapping[str, Any] | None = None,
    slots: int | None = None,
    args: Mapping[str, Any] | None = None,
    chaos: str = "",
    on_failure: str | None = None,
    max_failures: int | None = None,
    precision: str | None = None,
    recompute: bool | None = None,
    checkpoint: str | None = None,
    resume: str | None = None,
    trust: bool = False,
    weights_from: str | None = None,
    skip_seen: bool = False,
    name: str | None = None,
    runs: str | Path = "runs",
    overwrite: bool = False,
    progress: bool | None = None,
    output: TextIO | None = None,
    tensorboard: bool = False,
    zygote: ZygoteProcess | None = None,
    **overrides: Any,
) -> Run:
    """Train a task with many processes of this machine.

    `target` is `path.py:factory` or an importable factory function. `progress` shows a bar (True), plain lines
    (False), or what fits the output (None), which is standard output by default. `chaos` injects faults:
    `kill worker:1 at step 50`. `workers` may be limits, `1:4`; `on_failure` says what follows a death: `auto`,
    `replace`, `shrink`, `restart` or `stop`. Further keywords change fields of the task: `epochs=3`.

    `precision` is what the model computes in: `fp32`, `bf16`, `fp16` or `adaptive`. `recompute` saves memory:
    blocks of the model are computed again in the backward pass.

    `checkpoint` says when to save the training state: `every=200`. `resume` goes on with an earlier run, `RUN` or
    `RUN@STEP`, in its folder, with its task and settings but for those given here; of a `cluster` also single
    fields. Code that others could have written is refused there, unless you `trust` it. `weights_from` begins a
    new run from the weights of another, a checkpoint or a file; with `skip_seen` it leaves out the samples that
    the checkpoint has seen.
    """
    refuse_inside("train")
    shown = screen(progress, output)
    if workers is not None and cluster is None:
        cluster = {"workers": workers}
    said: dict[str, Any] = {"strategy": None if strategy is None else str(strategy), "cluster": cluster}
    said |= {"slots": slots, "checkpoint": checkpoint, "chaos": chaos, "overrides": overrides}
    said |= {"on_failure": on_failure, "max_failures": max_failures}
    said |= {"precision": precision, "recompute": recompute}
    if resume is not None:
        if target is not None or args or name is not None or weights_from is not None or skip_seen:
            raise SpecError(
                f"resume={resume!r} goes on with that run's own task, in its own folder; leave target, args, "
                "name, weights_from and skip_seen out."
            )
        folder = find_run(resume, runs)
        # Before the lock: nothing is written to a folder that is not ours.
        trusted_job(folder, trust=trust)
        prepare = partial(_resumed, resume, runs, shown, said, folder)
    else:
        if trust:
            raise SpecError("--trust is about the code of a run that goes on; name that run with --resume.")
        if skip_seen and weights_from is None:
            raise SpecError("--skip-seen leaves out what a checkpoint has seen; name it with --from.")
        options = {}
        if weights_from is not None:
            options = first_options(weights_from, runs, _warning_to(shown), skip_seen=skip_seen)
        job = new_job(target, args, options, said)
        folder = RunFolder.create(runs, name, overwrite, target=job.target)
        prepare = partial(_begun_anew, job, folder)
    # Nobody else works in the folder from here on; nothing of it is read or changed before.
    with RunLock(folder.path, _warning_to(shown)):
        job = replace(prepare(), run_dir=str(folder.path))
        extra = [TensorBoardSink(folder.tensorboard)] if tensorboard else []
        return execute(job, folder, shown, extra=extra, zygote=zygote)


def resume(run: str, **changes: Any) -> Run:
    """Go on with an earlier run, `RUN` or `RUN@STEP`, in its own folder; `changes` as `train` takes them."""
    return train(resume=run, **changes)


def scale(
    run: str, *, workers: int | None = None, servers: int | None = None, runs: str | Path = "runs"
) -> dict[str, Any]:
    """Change how many workers and servers a running job has; how many there are, where neither is given."""
    return request_scale(RunFolder.open(run, runs).path, workers=workers, servers=servers)


def new_job(
    target: str | Callable[..., Any] | None,
    args: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    said: Mapping[str, Any],
) -> Job:
    """The job of a run that begins; what is not said is as usual."""
    if target is None:
        raise SpecError("There is nothing to train: name a task, path.py:factory, or a run to resume.")
    given = {key: value for key, value in said.items() if value is not None}
    if not isinstance(given.get("cluster", Cluster()), Cluster):
        given["cluster"] = Cluster(**given["cluster"])
    return Job(
        target=locate(target if isinstance(target, str) else target_of(target)),
        args=dict(args or {}),
        options=dict(options),
        **given,
    )


def _begun_anew(job: Job, folder: RunFolder) -> Job:
    folder.clear()
    return job


def _resumed(resume: str, runs: str | Path, shown: Sink, said: dict[str, Any], folder: RunFolder) -> Job:
    path, manifest = find_whole(resume, runs, _warning_to(shown))
    job = resumed_job(folder.read_job(), path, manifest, said)
    # What a coordinator remembers is about the attempt that ended.
    folder.decisions.unlink(missing_ok=True)
    for text in (f"resuming {folder.name} after step {manifest.step:,}", left_out(job, manifest)):
        if text:
            shown.handle(Event("line", values={"text": text}))
    return job


def _warning_to(shown: Sink) -> Callable[[str], None]:
    return lambda text: shown.handle(Event("warning", values={"text": text}))


def screen(progress: bool | None = None, output: TextIO | None = None) -> Sink:
    """A bar for a terminal, plain lines for a log."""
    stream = sys.stdout if output is None else output
    if not (stream.isatty() if progress is None else progress):
        return PlainSink(stream)
    from rich.console import Console

    return ProgressSink(Console(file=stream))


def execute(
    job: Job,
    folder: RunFolder,
    shown: Sink | None,
    *,
    extra: Sequence[Sink] = (),
    zygote: ZygoteProcess | None = None,
) -> Run:
    """Run a job that keeps a folder; whatever happens, the folder tells, or an error says what it lacks."""
    if not folder.job.is_file():
        folder.write_job(job)
    record = _Record()
    events = JsonlSink(folder.path, lambda text: bus.emit(Event("warning", values={"text": text})))
    screens = [shown] if shown is not None else []
    beginning = _Beginning(job, folder)
    bus = Bus([events, record, beginning, *extra, *screens, FolderWatch(folder.path)])
    ending = partial(record.ending, "stopped", reason="failed")
    failure: ShoalError | None = None
    try:
        Attempts(job, folder, bus.emit).run(zygote)
        ending = partial(record.ending, "finished")
    except Interrupted as request:
        ending = partial(record.ending, "stopped", reason="interrupted")
        failure = Interrupted(f"{request} {_whereabouts(folder)}")
    except ShoalError as error:
        failure = error
        with suppress(DiskRefused):  # Where the folder itself is lost, the error says so.
            bus.emit(_failed(error))
            if beginning.is_over:
                folder.demote_model()
        error.args = (f"{error} {_how_to_go_on(folder, record.total_steps)}".strip(),)
    finally:
        missing = _leave_behind(folder, record, ending(), bus)
    if failure is not None:
        raise failure
    if missing:
        raise DiskRefused(f"The run came to its end, but not all that it made could be kept: {missing}")
    return Run(folder.path, record.results)


def _leave_behind(folder: RunFolder, record: _Record, ending: Event, bus: Bus) -> str:
    """Write what the end of a run leaves behind, as much as the disk takes; returns what it did not, and why."""

    def keep_result() -> None:
        if record.results and ending.values.get("reason") != "failed":
            folder.write_result({**record.results, "ended": ending.kind})

    missing = []
    report = partial(write_report, folder.path)
    saved = partial(_check_saved, folder, record.results if ending.kind == "finished" else None)
    for keep in (keep_result, folder.drop_partial_model, partial(bus.emit, ending), bus.close, report, saved):
        try:
            keep()
        except (ShoalError, OSError) as error:
            missing.append(str(error))
    return " ".join(dict.fromkeys(missing))


def _check_saved(folder: RunFolder, results: Mapping[str, Any] | None) -> None:
    """A run that has finished, with these results, has saved all that was asked for."""
    if results is not None and not folder.model.is_file():
        raise DiskRefused(f"the model is not in {near(str(folder.path))} any more.")
    due = (results or {}).get("due_checkpoints", [])
    if lacking := [str(step) for step in due if not is_checkpoint(folder.checkpoints / folder_name(step))]:
        raise DiskRefused(
            f"{near(str(folder.checkpoints))} lacks what was due after step {', '.join(lacking)}; the "
            f"warnings in {near(str(folder.report))} say why."
        )


class _Beginning:
    """A sink that lets a job take the place of the one before it, once its run has really begun.

    What is refused until then, by whomever, leaves a run that is resumed as it was.
    """

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder
        self._earlier = folder.model.stat() if folder.model.is_file() else None
        """The model of the attempt before, which is not what this one is to end with."""
        self._refusal: ShoalError | None = None
        self.is_over = False
        """Whether the folder is this job's now."""

    def handle(self, event: Event) -> None:
        if self.is_over or event.kind not in ("steps", "evaluation", "checkpoint"):
            return
        try:
            self._folder.write_job(self._job)
            if self._earlier is not None:
                self._folder.demote_model(self._earlier)
            self._folder.result.unlink(missing_ok=True)
            self.is_over = True
        except DiskRefused as refusal:
            self._refusal = refusal  # Tried again at the next step.

    def close(self) -> None:
        if not self.is_over and self._refusal is not None:
            raise self._refusal


def _failed(error: ShoalError) -> Event:
    """The event that tells why a run ended."""
    details, rank = (error.details, error.global_rank) if isinstance(error, WorkerFailed) else ("", None)
    return Event("failed", rank, {"message": str(error), "traceback": details})


class _Record:
    """A sink that remembers what the end of a run has to say."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.total_steps: int | None = None
        self._restarts = 0
        self._scales = WorkerScales()
        self._memory: dict[str, dict[str, int]] = {}
        """By kind of memory and rank: the most that was held."""
        self._started = time.monotonic()
        self._marks: list[tuple[float, int]] = []
        """When the first and the latest steps were told of, and how many samples they had trained on."""

    def handle(self, event: Event) -> None:
        if event.kind == "done":
            self._note_done(event)
        elif event.kind == "audit":
            self.results["audit"] = event.values
        elif event.kind == "steps":
            self.total_steps = event.values["total_steps"]
            self._marks[1:] = [(event.time, event.values["samples"])]
        elif event.kind == "restarted":
            # What the attempt before came to does not count.
            self._restarts += 1
            self.results, self._scales = {}, WorkerScales()

    def _note_done(self, event: Event) -> None:
        if event.rank == 0:
            self.results.update(event.values["results"])
            if self._restarts:
                self.results["restarts"] = self._restarts
        self.results |= self._scales.note(event.rank or 0, event.values["results"])
        for kind, nbytes in event.values.get("memory", {}).items():
            self._memory.setdefault(kind, {})[str(event.rank)] = nbytes
        names = {"host": "peak_memory", "gpu": "peak_gpu_memory"}
        self.results |= {names[kind]: dict(sorted(by_rank.items())) for kind, by_rank in self._memory.items()}

    def close(self) -> None: ...

    def ending(self, kind: str, **values: Any) -> Event:
        """The event that ends the run."""
        values |= {"results": self.results.get("results", {}), "seconds": time.monotonic() - self._started}
        if len(self._marks) == 2:
            (begin, before), (end, after) = self._marks
            values["samples_per_s"] = (after - before) / max(end - begin, 1e-9)
        return Event(kind, values=values)


def _whereabouts(folder: RunFolder) -> str:
    how = _how_to_go_on(folder)
    if folder.model.is_file():
        return f"The model so far is saved in {near(str(folder.model))}, the report beside it. {how}".strip()
    return f"No model was saved; what happened is in {near(str(folder.path))}. {how}".strip()


def _how_to_go_on(folder: RunFolder, total_steps: int | None = None) -> str:
    """Nothing where there is no checkpoint."""
    steps = [step_of(path) for path in step_folders(folder.checkpoints) if is_checkpoint(path)]
    if not steps:
        return ""
    run = folder.name if folder.path.parent == Path(DEFAULT_ROOT).absolute() else near(str(folder.path))
    if steps[-1] == total_steps:
        return f"All steps are taken; the model is also in the last checkpoint: shoal checkpoint export {run} FILE"
    return f"Go on after step {steps[-1]:,} with: shoal train --resume {run}"


def target_of(factory: Callable[..., Any]) -> str:
    """The `path.py:factory` of a function that other processes can import."""
    module = inspect.getmodule(factory)
    path = getattr(module, "__file__", None)
    if module is None or path is None or "." in factory.__qualname__ or factory.__name__ == "<lambda>":
        raise SpecError(
            f"{factory.__qualname__!r} lives only in this process (a notebook cell, a lambda, an inner function), "
            "so other processes cannot import it; write it to a file: %%writefile digits.py, then "
            "shoal.train('digits.py:task')."
        )
    return f"{path}:{factory.__name__}"


def locate(target: str) -> str:
    """The target with its file's whole path, so that it can be found from anywhere and at any later time."""
    path, colon, factory = target.partition(":")
    if not path.endswith(".py"):
        return target
    if not Path(path).is_file():
        raise SpecError(f"There is no file {path!r} in {Path.cwd()}; check the path.")
    return f"{Path(path).absolute()}{colon}{factory}"
