"""`shoal run`: start any script several times, as one world."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import CLUSTER, Port, Threads, Workers

ScriptStrategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        help="How its Trainers train that name no strategy: name:key=value,…; what servers it has are started.",
        rich_help_panel=CLUSTER,
    ),
]


def run(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script is given.", show_default=False)
    ] = None,
    workers: Workers = 1,
    strategy: ScriptStrategy = "data",
    port: Port = None,
    threads: Threads = None,
) -> None:
    """Start a script once per worker, under the variables that torchrun sets.

    Options of Shoal come before the script; what follows it is the script's.
    With several workers each line of output is shown after its worker's rank.
    The exit status is that of the worker that failed.
    With a strategy that has servers, these run the script, too, up to its `Trainer.fit()`.

    [dim]shoal run --workers 2 loop.py --lr 0.1[/dim]
    """
    from shoal.launch.scripts import run_script
    from shoal.observe import Event
    from shoal.observe.happenings import Decided, Hung, Lost, Replaced, Warned, WorldFormed
    from shoal.observe.wording import line
    from shoal.spec import Cluster

    def show(event: Event) -> None:
        # Also for one worker: nobody should have to guess which world was formed.
        if isinstance(event.what, WorldFormed | Warned):
            print(event.what.text, file=sys.stderr)
        elif isinstance(event.what, Hung | Lost | Replaced | Decided) and (text := line(event)) is not None:
            print(text, file=sys.stderr)

    cluster = Cluster(workers=workers, port=port, threads=threads)
    run_script(script, arguments or (), cluster=cluster, strategy=strategy, on_event=show, zygote=ctx.obj)
