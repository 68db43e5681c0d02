"""`shoal doctor`: can this machine do what Shoal needs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.json_output import print_json

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cli.checks import Check

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the checks as a JSON list and nothing else.")
    ] = False,
) -> None:
    """Check this machine: versions, shared memory, starting processes, cores, memory, disk, GPUs.

    The exit status is 1 where something that Shoal needs is missing.

    [dim]shoal doctor
    shoal doctor --json[/dim]
    """
    from shoal.cli.checks import examine

    checks = examine()
    if as_json:
        print_json([asdict(check) for check in checks], indent=2)
    else:
        from rich.console import Console

        Console().print(_table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _table(checks: Sequence[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", _STYLES[check.status])
        table.add_row(Text(check.status, _STYLES[check.status]), check.name, found)
    return table
