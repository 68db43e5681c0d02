"""Training runs, as the command line and Python start them: folder, observers, processes, report."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

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
from shoal.observe.wording import near
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
    output: TextIO | None = None,
    tensorboard: bool = False,
    zygote: ZygoteProcess | None = None,
    **overrides: Any,
) -> Run:
    """Train a task with many processes of this machine.

    `target` is `path.py:factory` or an importable factory function. `progress` shows a bar (True), plain lines
    (False), or what fits the output (None), which is standard output by default. Further keywords change
    fields of the task: `epochs=3`.
    """
    job = Job(
        target=locate(target if isinstance(target, str) else target_of(target)),
        args=dict(args or {}),
        strategy=str(strategy),
        cluster=cluster or Cluster(workers=workers),
        slots=slots,
        overrides=overrides,
    )
    folder = RunFolder.create(runs, name, overwrite, target=job.target)
    extra = [TensorBoardSink(folder.tensorboard)] if tensorboard else []
    job = replace(job, run_dir=str(folder.path))
    return execute(job, folder, screen(progress, output), extra=extra, zygote=zygote)


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
    """Run a job that keeps a folder; whatever happens, the folder tells."""
    folder.write_job(job)
    record = _Record()
    bus = Bus([JsonlSink(folder.path), record, *extra, *([shown] if shown is not None else [])])
    ending = Event("stopped", values={"reason": "failed"})
    try:
        Supervisor(job, bus.emit, LocalEngine(zygote)).run()
        ending = record.ending("finished")
    except Interrupted as request:
        ending = record.ending("stopped", reason="interrupted")
        raise Interrupted(f"{request} {_whereabouts(folder)}") from None
    except ShoalError as error:
        if not record.has_failed:
            bus.emit(Event("failed", values={"message": str(error), "traceback": ""}))
        raise
    finally:
        if record.results:
            folder.write_result({**record.results, "ended": ending.kind})
        bus.emit(ending)
        bus.close()
        write_report(folder.path)
    return Run(folder.path, record.results)


class _Record:
    """A sink that remembers what the end of a run has to say."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.has_failed = False
        self._started = time.monotonic()
        self._marks: list[tuple[float, int]] = []
        """When the first and the latest steps were told of, and how many samples they had trained on."""

    def handle(self, event: Event) -> None:
        if event.kind == "done" and event.rank == 0:
            self.results.update(event.values["results"])
        elif event.kind == "audit":
            self.results["audit"] = event.values
        elif event.kind == "steps":
            self._marks[1:] = [(event.time, event.values["samples"])]
        elif event.kind == "failed":
            self.has_failed = True

    def close(self) -> None: ...

    def ending(self, kind: str, **values: Any) -> Event:
        """The event that ends the run."""
        values |= {"results": self.results.get("results", {}), "seconds": time.monotonic() - self._started}
        if len(self._marks) == 2:
            (begin, before), (end, after) = self._marks
            values["samples_per_s"] = (after - before) / max(end - begin, 1e-9)
        return Event(kind, values=values)


def _whereabouts(folder: RunFolder) -> str:
    if folder.model.is_file():
        return f"The model so far is saved in {near(str(folder.model))}, the report beside it."
    return f"No model was saved; what happened is in {near(str(folder.path))}."


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
