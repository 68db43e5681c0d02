"""What is handed to `train` becomes a name that others can import, or a sentence that says how."""

from __future__ import annotations

import builtins
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.launch.targets import target_of
from shoal.spec import Task


def task() -> Task:
    return Task(model=lambda: None, optimizer=lambda params: None, loss=lambda a, b: a, train=[1])


MADE = task()


def test_what_stands_at_the_top_of_a_file() -> None:
    assert target_of(task) == f"{__file__}:task"
    assert target_of(MADE) == f"{__file__}:MADE"


@pytest.mark.parametrize(("given", "name"), [(lambda: MADE, "'<lambda>'"), (partial(task), "'partial'")])
def test_what_has_no_name_in_its_file(given: Any, name: str) -> None:
    with pytest.raises(SpecError, match=f"^{name} lives only in this process"):
        target_of(given)


def test_an_inner_function_and_a_task_of_a_function() -> None:
    def inner() -> Task:
        raise AssertionError("never called")

    with pytest.raises(SpecError, match="let a function at the top of its file make it"):
        target_of(inner)
    with pytest.raises(SpecError, match=r"^The task lives only in this process"):
        target_of(task())


def test_something_else() -> None:
    with pytest.raises(SpecError, match=r"nothing to train in a int; name a task, path\.py:factory"):
        target_of(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_notebook", "advice"),
    [(True, "%%writefile digits.py"), (False, "read from standard input, is in no file")],
)
def test_what_was_typed(monkeypatch: pytest.MonkeyPatch, is_notebook: bool, advice: str) -> None:
    typed = ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", typed)
    if is_notebook:
        monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    exec("def task(): ...", vars(typed))
    typed.made = task()
    for given in (typed.task, typed.made):
        with pytest.raises(SpecError, match=f"so other processes cannot import it; .*{advice}"):
            target_of(given)
