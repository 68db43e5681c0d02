"""Whoever comes from elsewhere finds an example for every row of the table, and each of them runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from helpers.scripts import run_as_main
from helpers.warm_commands import WarmCommands
from shoal.launch.owner import ZygoteProcess

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = {
    section.partition("\n")[0]: re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)
}
"""What stands in each section between fences."""
ROWS = dict(re.findall(r"^\| \[([^\]]+)\]\(#([\w-]+)\)", PAGE, re.MULTILINE))
IN_EVERY_TEST = ("Several processes", "Recomputed activations", "Following a run", "A loop of your own")
"""What the others do, tests of their own hold."""
FILE = re.compile(r"# (\w+\.py)\n")
"""How a block begins that is a file, for others to use."""


def test_every_row_has_its_section():
    assert ROWS and set(IN_EVERY_TEST) <= set(ROWS)
    assert {name.lower().replace(" ", "-"): name for name in ROWS} == {link: name for name, link in ROWS.items()}
    assert set(ROWS) == set(list(BLOCKS)[1:])


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in IN_EVERY_TEST else pytest.mark.long) for row in ROWS]
)
def test_the_example_of_a_row_runs(
    row: str, tmp_path: Path, warm_commands: WarmCommands, zygote: ZygoteProcess
) -> None:
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if name := FILE.match(block):
            (tmp_path / name[1]).write_text(block)
    examples = [block for block in BLOCKS[row] if not FILE.match(block)]
    assert examples
    for block in examples:
        if not block.startswith("$ "):
            script = tmp_path / "example.py"
            script.write_text(block)
            answer = run_as_main(script, folder=tmp_path, zygote=zygote)
            assert answer.returncode == 0 and answer.stdout, answer.stderr
            continue
        for line in block.splitlines():
            prompt, program, *words = shlex.split(line)
            assert (prompt, program) == ("$", "shoal")
            said = warm_commands(tmp_path, *words)
            assert said.status == 0, f"{line}\n{said.text}"
