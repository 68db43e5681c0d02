"""Floors import downwards only: errors and spec at the bottom, the command line at the top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
FLOORS = {
    "errors": 0,
    "lazy": 0,
    "spec": 1,
    "datasets": 2,
    "metrics": 2,
    "optim": 2,
    "observe": 3,
    "arena": 4,
    "comm": 5,
    "layout": 6,
    "ledger": 6,
    "privacy": 6,
    "feed": 7,
    "ps": 7,
    "coordinator": 8,
    "checkpoint": 9,
    "model": 10,
    "step": 11,
    "strategies": 12,
    "roles": 13,
    "launch": 14,
    "bench": 15,
    "keras": 15,
    "verification": 15,
    "sklearn": 15,
    "kv": 15,
    "federated": 15,
    "horovod": 16,
    "cli": 17,
}
BY_NAME = {"launch": ("model", "step", "strategies"), "verification": ("bench",), "bench": ("verification",)}
"""What a floor must not import, though it lies below or beside it: such code runs in other processes."""
LAUNCH_MAY_IMPORT_ROLES_IN = ("child", "taking")
"""The forked child becomes a role, and a model that is taken away is made where it is wanted; nothing else of
`launch` knows what roles are made of."""
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module or ""
            if node.module == "shoal":
                yield from (f"shoal.{alias.name}" for alias in node.names)


def floor_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "shoal" and len(parts) > 1 and parts[1] in FLOORS else None


def test_every_part_of_the_house_has_a_floor():
    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert parts - {"__init__", "__main__"} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    home = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if home == "__init__":
        return  # The front door: it names what is on every floor, and loads it on first use.
    for name in imported(path):
        floor = floor_of(name)
        if floor is None or floor == home:
            continue
        assert FLOORS[floor] < FLOORS[home], f"{home} imports {name}, which is not below it"
        assert floor not in BY_NAME.get(home, ()), f"{home} must not import {name}"
        if home == "launch" and floor == "roles":
            assert path.stem in LAUNCH_MAY_IMPORT_ROLES_IN, f"{path.name} imports {name}"


def test_the_command_line_reads_torch_free_modules_only():
    """Only roles, strategies and what lies beneath them may need torch when they are imported."""
    light = ("errors", "spec", "observe", "layout", "launch", "cli")
    for path in FILES:
        if path.relative_to(ROOT).parts[0].removesuffix(".py") not in light:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(name.split(".")[0] in ("torch", "numpy") for name in names), f"{path}: {names}"
