"""From a job's `path.py:factory` to its Task."""

from __future__ import annotations

import ast
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
        raise SpecError(
            f"{path} has no {name!r}; define `def {name}() -> shoal.Task` there (not under `if __name__ == "
            '"__main__":`, which workers pass over), or name another.'
        )
    task = _make(f"{path}:{name}", factory, dict(job.args))
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
    sys.path.insert(0, str(file.resolve().parent))
    if depth := _levels_of_imports(file):
        return _import_of_package(file.resolve(), depth)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _levels_of_imports(file: Path) -> int:
    """How far up a file's relative imports reach: 1 for `from .nets import Net`, 0 where it has none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return 0  # which Python tells better once it runs the file
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def _import_of_package(file: Path, depth: int) -> ModuleType:
    """A file that only works as part of its package, so it is imported as that."""
    names, folder = [file.stem], file.parent
    while len(names) <= depth or (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    name = ".".join(names)
    module = importlib.import_module(name)
    if module.__file__ is None or Path(module.__file__).resolve() != file:
        raise SpecError(
            f"{file} imports relatively, so it is imported as {name!r}, but that is {module.__file__} here; "
            "rename its package."
        )
    return module


def _make(target: str, factory: Any, args: dict[str, Any]) -> Task:
    """What the factory makes; what stands there may also be a task itself."""
    if isinstance(factory, Task):
        if args:
            raise SpecError(f"{target} is a Task, which takes no arguments, found {args}; let a function make it.")
        return factory
    if not callable(factory):
        raise SpecError(f"{target} must be a function that makes a Task, found {type(factory).__name__}.")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        raise SpecError(f"{target} was called with {args}: {error}; its arguments are: {known}.") from None
    task = factory(**args)
    if not isinstance(task, Task):
        raise SpecError(f"{target} must return a shoal.Task, found {type(task).__name__}.")
    return task
