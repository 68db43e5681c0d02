"""Training runs, as the command line and Python start them: folder, observers, processes, report."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shoal.errors import LaunchError, SpecError, unknown
from shoal.launch.archive.fetching import fetch_run
from shoal.launch.archive.store import UrlFolder, is_url
from shoal.launch.control import request_scale
from shoal.launch.fast import in_fastest_form
from shoal.launch.inside import refuse_inside
from shoal.launch.live import EventStream, LiveRun, Run
from shoal.launch.mixing import with_measured_shares
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import find_whole, first_options, left_out, resumed_job
from shoal.launch.targets import locate, target_of
from shoal.observe import Event, PlainSink, ProgressSink, RunFolder, Sink
from shoal.observe.checkpoint_names import find_run, names_checkpoint
from shoal.observe.happenings import Happening, LineSaid, Warned
from shoal.observe.loggers import Log, Logger, find_loggers, logger_sinks, several
from shoal.observe.run_lock import RunLock
from shoal.observe.told_marks import rewind_told
from shoal.observe.trust import trusted_job
from shoal.spec import Cluster, Job, StrategySpec, Task
from shoal.spec.job import OVERRIDES
from shoal.spec.privacy import Privacy

if TYPE_CHECKING:
    from shoal.launch.remote.adoption import Adoption

_OF_JOB = (
    *("strategy", "cluster", "slots", "checkpoint", "chaos", "overrides"),
    *("on_failure", "max_failures", "precision", "recompute", "privacy"),
    *("compile", "graph", "memory_format", "products", "convolutions"),
    *("loss_in_pieces", "flat_update", "offload"),
    *("fast", "sync_device"),
)
"""What a job is made of, besides its target."""
Tell = Callable[[Happening], None]


def train(
    target: str | Callable[..., Any] | Task | Job | None = None,
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
    privacy: str | Privacy | None = None,
    compile: bool | None = None,
    graph: bool | None = None,
    memory_format: str | None = None,
    products: str | None = None,
    convolutions: str | None = None,
    loss_in_pieces: bool | None = None,
    flat_update: bool | None = None,
    offload: str | None = None,
    fast: bool | None = None,
    sync_device: bool | None = None,
    checkpoint: str | None = None,
    archive: str | None = None,
    resume: str | None = None,
    trust: bool = False,
    weights_from: str | None = None,
    skip_seen: bool = False,
    name: str | None = None,
    runs: str | Path = "runs",
    overwrite: bool = False,
    progress: bool | None = None,
    output: TextIO | None = None,
    log: Log | None = None,
    tensorboard: bool = False,
    zygote: ZygoteProcess | None = None,
    **overrides: Any,
) -> Run:
    """Train a task with many processes of this machine.

    `target` is `path.py:factory`, an importable factory function, a `Task` at the top of a file, or a whole `Job`.
    `progress` shows a bar (True), plain lines (False), or what fits the output (None), which is standard output by
    default. `chaos` injects faults: `kill worker:1 at step 50`. `workers` may be limits, `1:4`; `on_failure` says
    what follows a death: `auto`, `replace`, `shrink`, `restart` or `stop`. Further keywords change fields of the
    task: `epochs=3`.

    `precision` is what the model computes in: `fp32`, `bf16`, `fp16` or `adaptive`. `recompute` saves memory:
    blocks of the model are computed again in the backward pass.

    `privacy` limits what the model tells of its data: `epsilon=8,delta=1e-5` finds the noise that is added to
    clipped gradients, or clients' differences; `noise=1.1` names it.

    `compile`, `graph` (on a GPU), `memory_format` ("channels_last"), `products` ("onednn", on a CPU),
    `convolutions` ("patches", on a CPU) and `loss_in_pieces` change how a step is computed; `fast` tries them
    before the run, and bf16 where `precision` is `auto`, and takes the fastest. `flat_update` updates linear
    layers on a GPU in one kernel; `offload` ("optimizer") keeps what the optimizer keeps in the host's memory.
    `sync_device` makes a GPU do one thing after the other.

    `checkpoint` says when to save the training state: `every=200`. `resume` goes on with an earlier run, `RUN` or
    `RUN@STEP`, in its folder, with its task and settings but for those given here; of a `cluster` also single
    fields. Code that others could have written is refused there, unless you `trust` it. `weights_from` begins a
    new run from the weights of another, a checkpoint or a file; with `skip_seen` it leaves out the samples that
    the checkpoint has seen.

    `archive` is a URL under which the run is put as it goes on, in a folder of its name: checkpoints, model, logs
    and report (`s3://bucket/runs`, any store that fsspec knows); `none`: from now on nowhere. `resume` takes what
    lies there, too: `s3://bucket/runs/RUN@STEP`.

    `log` names loggers, or is some: `csv`, `tensorboard`, `wandb`, `mlflow:sqlite:///mlflow.db`, one or a list.
    `tensorboard=True` is the same as `log="tensorboard"`.
    """
    said = dict(locals())  # Before all else: what was said, by name.
    refuse_inside("train")
    shown = screen(progress, output)
    return _prepared(said, _teller_to(shown), [shown]).run()


def start(target: str | Callable[..., Any] | Task | Job | None = None, **settings: Any) -> LiveRun:
    """Begin to train, and do something else meanwhile: follow the run's events, scale it, stop it, wait for it.

    Takes what `train` takes, and shows nothing unless `progress` or `output` is given. What cannot be is refused
    at once; what goes wrong later is raised by `wait`. May be called in any thread, for several runs at a time.
    """
    refuse_inside("start")
    said = inspect.signature(train).bind(target, **settings)
    said.apply_defaults()
    shows = not {"progress", "output"}.isdisjoint(settings)
    shown = [screen(said.arguments["progress"], said.arguments["output"])] if shows else []
    stream = EventStream()
    return _prepared(said.arguments, _teller_to(stream), shown, stream).begin()


def resume(run: str, **changes: Any) -> Run:
    """Go on with an earlier run, `RUN` or `RUN@STEP`, in its own folder; `changes` as `train` takes them."""
    return train(resume=run, **changes)


def scale(
    run: str,
    *,
    workers: int | None = None,
    servers: int | None = None,
    hosts: str | None = None,
    runs: str | Path = "runs",
) -> dict[str, Any]:
    """Change how many workers and servers a running job has, or hosts (`3`, `+1`, `-1`); how many there are, where
    none is given."""
    return request_scale(RunFolder.open(run, runs).path, workers=workers, servers=servers, hosts=hosts)


def new_job(
    target: str | Callable[..., Any] | Task | None,
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


def _prepared(
    said: Mapping[str, Any], tell: Tell, shown: Sequence[Sink], stream: EventStream | None = None
) -> LiveRun:
    """A run that is about to begin, in a folder that is its own from here on. `said`: the arguments of `train`."""
    _check_names(said["overrides"])
    warn = _warning(tell)
    log = _said_loggers(said)
    loggers = find_loggers(log or ())
    if (archive := said["archive"]) not in (None, "none"):
        UrlFolder(archive)  # What cannot be used is said before anything is begun.
    wishes = {name: said[name] for name in _OF_JOB}
    wishes["strategy"] = None if said["strategy"] is None else str(said["strategy"])
    wishes["privacy"] = None if said["privacy"] is None else str(said["privacy"])
    if said["workers"] is not None and said["cluster"] is None:
        wishes["cluster"] = {"workers": said["workers"]}
    if said["resume"] is not None and is_url(said["resume"]):
        said = {**said, "resume": fetch_run(said["resume"], said["runs"], warn, trust=said["trust"])}
    if said["resume"] is not None:
        folder = _resumable(said)
        prepare = partial(_resumed, said, wishes, folder, tell)
    else:
        job = _first_job(said, wishes, warn)
        folder = RunFolder.create(said["runs"], said["name"], said["overwrite"], target=job.target)
        prepare = partial(_begun_anew, job, folder)
    with ExitStack() as at_end:
        # Nobody else works in the folder from here on; nothing of it is read or changed before.
        at_end.enter_context(RunLock(folder.path, warn))
        adoption = None if said["resume"] is None else _adopted(said, wishes, folder)
        job = adoption.past.job if adoption is not None else replace(prepare(), run_dir=str(folder.path))
        if job.conduct.is_measured_first and adoption is None:
            job, text = with_measured_shares(job, said["zygote"])
            tell(LineSaid(text=text))
        if job.fast and adoption is None:
            job, text = in_fastest_form(job, said["zygote"])
            tell(LineSaid(text=text))
        if log is not None:
            job = replace(job, options={**job.options, "log": [one for one in log if isinstance(one, str)]})
        else:
            loggers = find_loggers(job.options.get("log", ()))
        if archive is not None:
            others = {name: value for name, value in job.options.items() if name != "archive"}
            job = replace(job, options=others if archive == "none" else {**others, "archive": archive})
        sinks: list[Sink] = [*shown, *logger_sinks(loggers, folder, job)]
        left = at_end.pop_all()
        return LiveRun(job, folder, sinks, stream=stream, zygote=said["zygote"], at_end=left, adoption=adoption)


def _said_loggers(said: Mapping[str, Any]) -> list[str | Logger] | None:
    """What was said of loggers; None where nothing was, so that a resumed run keeps those that it had."""
    if said["log"] is None and not said["tensorboard"]:
        return None
    return several([*several(said["log"] or ()), *["tensorboard"] * said["tensorboard"]])


def _check_names(overrides: Mapping[str, Any]) -> None:
    """A misspelt keyword of `train` is found among the fields of the task that a run changes."""
    for name in overrides:
        if name not in OVERRIDES:
            own = [known for known in inspect.signature(train).parameters if known not in ("overrides", "zygote")]
            raise unknown("train: keyword", name, [*own, *OVERRIDES])


def _resumable(said: Mapping[str, Any]) -> RunFolder:
    """The folder of a run that is to go on."""
    if any(said[name] for name in ("target", "args", "weights_from", "skip_seen")) or said["name"] is not None:
        raise SpecError(
            f"resume={said['resume']!r} goes on with that run's own task, in its own folder; leave target, args, "
            "name, weights_from and skip_seen out."
        )
    folder = find_run(said["resume"], said["runs"])
    # Before the lock: nothing is written to a folder that is not ours.
    trusted_job(folder, trust=said["trust"])
    return folder


def _first_job(said: Mapping[str, Any], wishes: Mapping[str, Any], warn: Callable[[str], None]) -> Job:
    """The job of a run that begins."""
    if said["trust"]:
        raise SpecError("--trust is about the code of a run that goes on; name that run with --resume.")
    if said["skip_seen"] and said["weights_from"] is None:
        raise SpecError("--skip-seen leaves out what a checkpoint has seen; name it with --from.")
    if isinstance(said["target"], Job):
        if others := [name for name in (*_OF_JOB, "workers", "args", "weights_from") if said[name]]:
            raise SpecError(f"A Job says itself what {', '.join(others)} would say; change the job instead.")
        return said["target"]
    options = {}
    if said["weights_from"] is not None:
        options = first_options(said["weights_from"], said["runs"], warn, skip_seen=said["skip_seen"])
    return new_job(said["target"], said["args"], options, wishes)


def _adopted(said: Mapping[str, Any], wishes: Mapping[str, Any], folder: RunFolder) -> Adoption | None:
    """The run as it goes on without its supervisor; None where it does not."""
    if not folder.journal.is_file():
        return None
    from shoal.launch.remote.adoption import adopt

    if (adoption := adopt(folder.journal)) is None:
        folder.journal.unlink(missing_ok=True)
        return None
    if any(value for value in wishes.values()) or names_checkpoint(said["resume"]):
        adoption.abandon()
        raise LaunchError(
            f"Run {folder.name!r} goes on without its supervisor, and nothing of it can be changed before another "
            f"has its place; say --resume {folder.name} alone, or wait until its hosts have ended, at most "
            f"{adoption.past.job.cluster.grace:g} s after it."
        )
    return adoption


def _begun_anew(job: Job, folder: RunFolder) -> Job:
    folder.clear()
    return job


def _resumed(said: Mapping[str, Any], wishes: Mapping[str, Any], folder: RunFolder, tell: Tell) -> Job:
    path, manifest = find_whole(said["resume"], said["runs"], _warning(tell))
    job = resumed_job(folder.read_job(), path, manifest, wishes)
    # What a coordinator remembers is about the attempt that ended.
    folder.decisions.unlink(missing_ok=True)
    rewind_told(folder.told, folder.events, manifest.step)
    folder.unsent.unlink(missing_ok=True)
    for text in (f"resuming {folder.name} after step {manifest.step:,}", left_out(job, manifest)):
        if text:
            tell(LineSaid(text=text))
    return job


def _teller_to(sink: Sink) -> Tell:
    return lambda what: sink.handle(Event(what))


def _warning(tell: Tell) -> Callable[[str], None]:
    return lambda text: tell(Warned(text=text))


def screen(progress: bool | None = None, output: TextIO | None = None) -> Sink:
    """A bar for a terminal, plain lines for a log."""
    stream = sys.stdout if output is None else output
    if not (stream.isatty() if progress is None else progress):
        return PlainSink(stream)
    from rich.console import Console

    return ProgressSink(Console(file=stream))
