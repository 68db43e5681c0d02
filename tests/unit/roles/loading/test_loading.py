"""From a job's target to its task, or a sentence that says what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.roles.loading.task import load_task
from shoal.spec import Job, Task

CODE = """
import shoal
from sibling_of_tasks import LENGTH

def task(length: int = LENGTH, seed: int = 0) -> shoal.Task:
    return shoal.Task(
        model=lambda: None, optimizer=lambda params: None, loss=lambda a, b: a, train=range(length), seed=seed
    )

number = 3
made = task(4)

def nothing():
    return None

def broken():
    raise RuntimeError("on purpose")
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sibling_of_tasks.py").write_text("LENGTH = 5\n")
    (tmp_path / "loaded_tasks.py").write_text(CODE)
    return "loaded_tasks.py"


def test_the_factory_is_called_with_the_jobs_arguments(tasks: str) -> None:
    task = load_task(Job(target=f"{tasks}:task", args={"length": 7}, overrides={"epochs": 4, "seed": 2}))
    assert isinstance(task, Task)
    assert (len(task.train), task.epochs, task.seed) == (7, 4, 2)
    assert len(load_task(Job(target=tasks)).train) == 5


def test_a_task_at_the_top_of_a_file(tasks: str) -> None:
    task = load_task(Job(target=f"{tasks}:made", overrides={"epochs": 4}))
    assert (len(task.train), task.epochs) == (4, 4)


def test_a_module_by_its_name(tasks: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    assert len(load_task(Job(target="loaded_tasks:task")).train) == 5


@pytest.mark.parametrize("has_init", [True, False])
@pytest.mark.parametrize("line", ["from .parts import LENGTH", "from ..above import LENGTH"])
def test_a_file_of_a_package(tasks: str, tmp_path: Path, has_init: bool, line: str) -> None:
    # Names of their own: of a package, Python remembers what it has imported.
    package = tmp_path / f"outer_{has_init}_{'above' in line}" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent) if has_init else ():
        (folder / "__init__.py").touch()
    (package / "parts.py").write_text("LENGTH = 3\n")
    (package.parent / "above.py").write_text("LENGTH = 8\n")
    (package / "tasks.py").write_text(CODE.replace("from sibling_of_tasks import LENGTH", line))
    target = f"{package.relative_to(tmp_path)}/tasks.py"
    assert len(load_task(Job(target=target)).train) == (8 if "above" in line else 3)


def test_a_package_that_is_another(tasks: str, tmp_path: Path) -> None:
    package = tmp_path / "json"
    package.mkdir()
    (package / "decoder.py").write_text("from .parts import LENGTH\n")
    with pytest.raises(SpecError, match=r"json/decoder\.py imports relatively, .* rename its package"):
        load_task(Job(target="json/decoder.py"))


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("missing.py:task", {}, "There is no file 'missing.py' in /"),
        ("no_such_module:task", {}, "There is no module 'no_such_module'; write the path of a file"),
        ("loaded_tasks.py:tsk", {}, "loaded_tasks.py has no 'tsk'; define `def tsk"),
        ("loaded_tasks.py:number", {}, "must be a function that makes a Task, found int"),
        ("loaded_tasks.py:nothing", {}, "must return a shoal.Task, found NoneType"),
        (
            "loaded_tasks.py:task",
            {"size": 3},
            "unexpected keyword argument 'size'; its arguments are: length, seed",
        ),
        ("loaded_tasks.py:made", {"size": 3}, "loaded_tasks.py:made is a Task, which takes no arguments"),
        ("loaded_tasks.py:nothing", {"size": 3}, "its arguments are: none"),
    ],
)
def test_what_is_wrong_is_said(tasks: str, target: str, args: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_task(Job(target=target, args=args))


def test_the_users_own_errors_pass_through(tasks: str) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        load_task(Job(target=f"{tasks}:broken"))
    Path("needy.py").write_text("import a_library_nobody_has\n")
    with pytest.raises(ModuleNotFoundError, match="a_library_nobody_has"):
        load_task(Job(target="needy.py"))
    with pytest.raises(SpecError, match="epochs must be"):
        load_task(Job(target=tasks, overrides={"epochs": 0}))
