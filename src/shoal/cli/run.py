"""`shoal run`: start any script several times, as one world."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import Port, Threads, Workers


def run(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script is given.", show_default=False)
    ] = None,
    workers: Workers = 1,
    port: Port = None,
    threads: Threads = None,
) -> None:
    """Start a script once per worker, under the variables that torchrun sets.

    Options of Shoal come before the script; what follows it is the script's.
    With several workers each line of output is shown after its worker's rank.
    The exit status is that of the worker that failed.

    [dim]shoal run --workers 2 loop.py --lr 0.1[/dim]
    """
    from shoal.launch.scripts import run_script
    from shoal.observe import Event
    from shoal.observe.happenings import Warned, WorldFormed
    from shoal.spec import Cluster

    def show(event: Event) -> None:
        # Also for one worker: nobody should have to guess which world was formed.
        if isinstance(event.what, WorldFormed | Warned):
            print(event.what.text, file=sys.stderr)

    cluster = Cluster(workers=workers, port=port, threads=threads)
    run_script(script, arguments or (), cluster=cluster, on_event=show, zygote=ctx.obj)
