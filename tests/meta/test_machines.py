"""The supervisor's machine decides without I/O: nothing it is made of can wait or look at a clock."""

from __future__ import annotations

import ast
from pathlib import Path

import shoal.launch

FOLDER = Path(shoal.launch.__file__).parent
DOES_IO = {
    "asyncio",
    "multiprocessing",
    "os",
    "psutil",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
}
DOES_IO |= {"tempfile", "time", "zmq"}
PLANS_BEFOREHAND = {"worlds"}
"""Also chooses a port and a secret, before the machine is made."""


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_of(module: str) -> set[str]:
    """The files of `launch` that a file of it is made of."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in found or name in PLANS_BEFOREHAND:
            continue
        found.add(name)
        imported = (one.split(".") for one in imports_of(FOLDER / f"{name}.py"))
        parts = {one[2] for one in imported if one[:2] == ["shoal", "launch"] and len(one) > 2}
        waiting += [part for part in parts if (FOLDER / f"{part}.py").is_file()]
    return found


def test_nothing_in_the_supervisors_machine_does_io() -> None:
    parts = parts_of("machine")
    assert {"machine", "service", "membership", "vigil", "chaos", "resizing", "messages"} <= parts
    for part in sorted(parts):
        forbidden = {name.split(".")[0] for name in imports_of(FOLDER / f"{part}.py")} & DOES_IO
        assert not forbidden, f"launch/{part}.py is a part of the supervisor's machine and imports {forbidden}"
