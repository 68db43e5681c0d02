"""From a job's `path.py:factory` to its Task."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.datasets.folds import with_fold
from shoal.datasets.given import numbered
from shoal.errors import SpecError
from shoal.roles.loading.incremental import History, without_seen
from shoal.spec import Fold, Job, Task
from shoal.spec.features import check_task
from shoal.spec.vocabulary import Purpose

DEFAULT_FACTORY = "task"


def load_task(job: Job) -> Task:
    """Import the job's code, call its factory, apply the job's overrides. User errors pass through."""
    path, _, name = job.target.partition(":")
    name = name or DEFAULT_FACTORY
    factory = getattr(_import(path), name, None)
    if factory is None:
        raise SpecError(f"{path} has no {name!r}; define `def {name}() -> shoal.Task` there, or name another.")
    _check_arguments(f"{path}:{name}", factory, dict(job.args))
    task = factory(**job.args)
    if not isinstance(task, Task):
        raise SpecError(f"{path}:{name} must return a shoal.Task, found {type(task).__name__}.")
    overrides = dict(job.overrides)
    fold, history = overrides.pop("fold", None), History(job)
    if fold and history.skips_seen:
        raise SpecError("--skip-seen and --fold both choose samples of the train set; leave one of them out.")
    task = numbered(task, overrides)
    if fold:
        task = with_fold(task, Fold.parse(fold))
    if history.skips_seen:
        task = without_seen(task, history.passes)
    if job.purpose == Purpose.TRAIN:
        check_task(task, job.conduct, job.strategy)
    return task


def _import(path: str) -> ModuleType:
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            raise SpecError(
                f"There is no module {path!r}; write the path of a file (digits.py) or an installed module."
            ) from None
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"There is no file {path!r} in {Path.cwd()}; check the path.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _check_arguments(target: str, factory: Any, args: dict[str, Any]) -> None:
    if not callable(factory):
        raise SpecError(f"{target} must be a function that makes a Task, found {type(factory).__name__}.")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise SpecError(f"{target} was called with {args}: {error}; its arguments are: {known}.") from None
