"""From what a user hands to `train` to `path.py:name`, which every process can import by itself."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import SpecError
from shoal.spec import Task


def target_of(given: Callable[..., Any] | Task) -> str:
    """The `path.py:name` of a function that makes a task, or of a task that stands at the top of a file."""
    if isinstance(given, Task):
        module, name = _whereabouts(given)
    elif callable(given):
        module, name = inspect.getmodule(given), getattr(given, "__qualname__", "")
    else:
        raise SpecError(
            f"There is nothing to train in a {type(given).__name__}; name a task, path.py:factory, or pass a "
            "function that returns a shoal.Task."
        )
    path = getattr(module, "__file__", None)
    if path is None or not name.isidentifier():
        kind = "The task" if isinstance(given, Task) else repr(name or type(given).__name__)
        raise SpecError(
            f"{kind} lives only in this process, so other processes cannot import it; {_way_out(module)}"
        )
    return f"{path}:{name}"


def locate(target: str) -> str:
    """The target with its file's whole path, so that it can be found from anywhere and at any later time."""
    path, colon, factory = target.partition(":")
    if not path.endswith(".py"):
        return target
    if not Path(path).is_file():
        raise SpecError(f"There is no file {path!r} in {Path.cwd()}; check the path.")
    return f"{Path(path).absolute()}{colon}{factory}"


def _whereabouts(task: Task) -> tuple[ModuleType | None, str]:
    """The module at whose top this very task stands, and its name there; no name where there is none."""
    main = sys.modules.get("__main__")
    for module in (main, *list(sys.modules.values())):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is task:
                    return module, name
    return main, ""


def _way_out(module: ModuleType | None) -> str:
    if getattr(module, "__file__", None) is not None:
        return (
            "let a function at the top of its file make it (no lambda, no inner function), def task(): return "
            "shoal.Task(…), and pass that: shoal.train(task)."
        )
    if hasattr(builtins, "__IPYTHON__"):
        return (
            "a notebook's cells are in no file, so write the one with it to a file, %%writefile digits.py, then "
            "shoal.train('digits.py:task')."
        )
    return (
        "what is typed, or read from standard input, is in no file, so write it to one, then "
        "shoal.train('digits.py:task')."
    )
