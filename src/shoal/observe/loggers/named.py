"""Loggers by their names: `csv`, `mlflow:sqlite:///mlflow.db`; packages bring more as entry points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from shoal.errors import unknown
from shoal.observe.loggers.base import LoggedRun, Logger
from shoal.observe.loggers.csv_files import CsvLogger
from shoal.observe.loggers.mlflow import MlflowLogger
from shoal.observe.loggers.sink import LoggerSink
from shoal.observe.loggers.tensorboard import TensorBoardLogger
from shoal.observe.loggers.wandb import WandbLogger
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job

ENTRY_POINTS = "shoal.loggers"
"""Each names what makes a logger from the text behind its name and a colon."""
_OWN: dict[str, Callable[[str], Logger]] = {
    "csv": CsvLogger,
    "mlflow": MlflowLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}

Log: TypeAlias = str | Logger | Iterable[str | Logger]
"""What `log=` takes: loggers, or what they are called; one or several."""


def several(log: Log) -> list[str | Logger]:
    """Each once."""
    return list(dict.fromkeys([log] if isinstance(log, str | Logger) else log))


def find_loggers(log: Iterable[str | Logger]) -> dict[str, Logger]:
    """By the names that their folders have: the second of a kind is `mlflow-2`."""
    loggers: dict[str, Logger] = {}
    count: Counter[str] = Counter()
    for one in log:
        kind = one.partition(":")[0] if isinstance(one, str) else type(one).__name__
        count[kind] += 1
        name = kind if count[kind] == 1 else f"{kind}-{count[kind]}"
        loggers[name] = _find(one) if isinstance(one, str) else one
    return loggers


def logger_sinks(loggers: Mapping[str, Logger], folder: RunFolder, job: Job) -> list[LoggerSink]:
    """What tells these loggers of the run in `folder`."""
    sinks = []
    for name, logger in loggers.items():
        run = LoggedRun(name=folder.name, folder=folder.logged / name, settings=_settings(job))
        sinks.append(LoggerSink(name, logger, run, folder))
    return sinks


def _find(written: str) -> Logger:
    name, _, setting = written.partition(":")
    make = _OWN.get(name)
    if make is None:
        for found in entry_points(group=ENTRY_POINTS, name=name):
            make = found.load()
    if make is None:
        raise unknown("logger", name, [*_OWN, *entry_points(group=ENTRY_POINTS).names])
    return make(setting)


def _settings(job: Job) -> dict[str, Any]:
    """What was asked for, as plain values by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in asdict(job).items():
        if name in ("run_dir", "options"):
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            flat[name] = value
    if job.protection is not None:
        flat["privacy"] = job.protection.told  # the key is for nobody else
    return {name: value for name, value in flat.items() if value is not None}
