"""Whole runs, as the command line and Python start them: folder, observers, processes, report."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import Interrupted, ShoalError, SpecError
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.observe import (
    Bus,
    Event,
    JsonlSink,
    PlainSink,
    ProgressSink,
    RunFolder,
    Sink,
    TensorBoardSink,
    write_report,
)
from shoal.spec import Cluster, Job, StrategySpec
from shoal.spec.job import OVERRIDES


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
    target: str | Callable[..., Any],
    *,
    workers: int = 1,
    strategy: str | StrategySpec = "data",
    cluster: Cluster | None = None,
    slots: int | None = None,
    args: Mapping[str, Any] | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    overwrite: bool = False,
    progress: bool | None = None,
    tensorboard: bool = False,
    zygote: ZygoteProcess | None = None,
    **overrides: Any,
) -> Run:
    """Train a task with many processes of this machine.

    `target` is `path.py:factory` or an importable factory function. `progress` shows a bar (True), plain lines
    (False), or what fits the output (None). Further keywords change fields of the task: `epochs=3`.
    """
    job = Job(
        target=target if isinstance(target, str) else target_of(target),
        args=dict(args or {}),
        strategy=str(strategy),
        cluster=cluster or Cluster(workers=workers),
        slots=slots,
        overrides=overrides,
    )
    folder = RunFolder.create(runs, name, overwrite, target=job.target)
    extra = [TensorBoardSink(folder.tensorboard)] if tensorboard else []
    return execute(replace(job, run_dir=str(folder.path)), folder, screen(progress), extra=extra, zygote=zygote)


def screen(progress: bool | None = None) -> Sink:
    """A bar for a terminal, plain lines for a log."""
    return ProgressSink() if (sys.stdout.isatty() if progress is None else progress) else PlainSink()


def execute(
    job: Job,
    folder: RunFolder,
    shown: Sink | None,
    *,
    extra: Sequence[Sink] = (),
    zygote: ZygoteProcess | None = None,
) -> Run:
    """Run a job that keeps a folder; whatever happens, the folder tells."""
    folder.write_job(job)
    bus = Bus([JsonlSink(folder.path), *extra, *([shown] if shown is not None else [])])
    started = time.monotonic()
    ending = Event("stopped", values={"reason": "failed"})
    results: dict[str, Any] = {}

    def on_event(event: Event) -> None:
        if event.kind == "done" and event.rank == 0:
            results.update(event.values["results"])
        bus.emit(event)

    try:
        Supervisor(job, on_event, LocalEngine(zygote)).run()
        ending = _finished(results, time.monotonic() - started)
    except Interrupted:
        ending = Event("stopped", values={"reason": "interrupted", "results": results})
        raise
    except ShoalError as error:
        bus.emit(Event("failed", values={"message": str(error), "traceback": getattr(error, "details", "")}))
        raise
    finally:
        if results:
            folder.write_result({**results, "ended": ending.kind})
        bus.emit(ending)
        bus.close()
        write_report(folder.path)
    return Run(folder.path, results)


def _finished(results: dict[str, Any], seconds: float) -> Event:
    return Event("finished", values={"results": results, "seconds": seconds})


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


def check_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in values.items() if name in OVERRIDES and value is not None}
