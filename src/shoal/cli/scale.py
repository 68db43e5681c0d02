"""`shoal scale`: more or fewer processes for a run that is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import CLUSTER, AsJson, Runs, SavedRun
from shoal.cli.json_output import print_json


def scale(
    run: SavedRun,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="So many processes shall train.", rich_help_panel=CLUSTER),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(min=1, help="So many servers shall share the model.", rich_help_panel=CLUSTER),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="So many hosts, or so many more or fewer: 3, +1, -1.", rich_help_panel=CLUSTER),
    ] = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Change how many workers and servers a running job has, or tell how many there are.

    Training goes on meanwhile, and a synchronous run keeps every bit of its result. Runs of strategy ps can be
    scaled, and the workers of data and average in shared memory: up to as many as the run was
    started for.

    [dim]shoal scale digits-20250131-120000
    shoal scale demo --workers 4 --servers 3
    shoal scale demo --hosts -1[/dim]
    """
    from shoal.launch import runs as known
    from shoal.observe import RunFolder

    answer = known.scale(run, workers=workers, servers=servers, hosts=hosts, runs=runs)
    if as_json:
        print_json({"run": str(RunFolder.open(run, runs).path), **answer})
    else:
        print(answer["text"])
