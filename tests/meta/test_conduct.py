"""Nobody asks which strategy a job has: facts say how it behaves, and the page about them is made from them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import shoal
from helpers.compatibility_page import page
from shoal.spec.strategy import StrategySpec

SOURCE = Path(shoal.__file__).parent
HOMES = (
    "spec/strategy.py",
    "spec/data.py",
    "spec/parameter_server.py",
    "spec/model_parallel.py",
    "spec/layerwise.py",
)
FOLDERS = ("strategies/data", "strategies/ps", "strategies/mesh", "strategies/layer")
"""Where a strategy is at home, and may ask itself what it is."""


def subclasses(cls: type) -> set[str]:
    found = {cls.__name__}
    for each in cls.__subclasses__():
        if each.__module__.startswith("shoal."):
            found |= subclasses(each)
    return found


def type_tests(path: Path, names: set[str]) -> list[str]:
    """Where a file asks for the type of a strategy's spec: `isinstance`, `type(…) is`, `match`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                asked = list(node.args[1:])
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            if isinstance(node.left.func, ast.Name) and node.left.func.id == "type":
                asked = list(node.comparators)
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        for part in asked:
            for name in ast.walk(part):
                if isinstance(name, ast.Name) and name.id in names:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} asks for {name.id}")
    return found


def test_the_search_finds_type_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    file = tmp_path / "asks.py"
    file.write_text("isinstance(a, Data | Layer)\ntype(a) is Mesh\nmatch a:\n    case Data():\n        pass\n")
    assert len(type_tests(file, subclasses(StrategySpec))) == 4


def test_nobody_asks_for_the_type_of_a_strategy() -> None:
    names = subclasses(StrategySpec) - {"StrategySpec"}
    assert {"Data", "ParameterServer", "Mesh", "Layer"} <= names
    files = [
        path
        for path in SOURCE.rglob("*.py")
        if (where := str(path.relative_to(SOURCE))) not in HOMES and not where.startswith(FOLDERS)
    ]
    assert len(files) > 250
    assert [found for path in files for found in type_tests(path, names)] == []


def test_the_page_about_compatibility_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "compatibility.md"
    assert written.read_text(encoding="utf-8") == page(), (
        "run python tests/helpers/compatibility_page.py > docs/compatibility.md"
    )
