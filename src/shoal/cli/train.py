"""`shoal train`: train a task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import (
    CLUSTER,
    RECORD,
    SCREEN,
    TASK,
    AsJson,
    Device,
    Port,
    Progress,
    Threads,
    Workers,
    parse_arguments,
)


def train(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="path.py:factory or package.module:factory; the factory defaults to task.",
            show_default=False,
        ),
    ],
    workers: Workers = 1,
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="How: name:key=value,…", rich_help_panel=CLUSTER)
    ] = "data",
    slots: Annotated[
        int | None,
        typer.Option(
            help="Parts of a global batch; default one per worker. Equal slots and threads give equal bits.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    spares: Annotated[
        int, typer.Option(help="Processes that wait to replace one that dies.", rich_help_panel=CLUSTER)
    ] = 0,
    threads: Threads = None,
    device: Device = "cpu",
    port: Port = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the factory, name=value; repeatable.", rich_help_panel=TASK),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of one step of all workers.", rich_help_panel=TASK)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", rich_help_panel=TASK)] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.", rich_help_panel=TASK)] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random number.", rich_help_panel=TASK)] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Pieces of a worker's batch, to save memory.", rich_help_panel=TASK)
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Evaluate after so many steps.", rich_help_panel=TASK)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name; default target and time.", rich_help_panel=RECORD)
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.", rich_help_panel=RECORD)] = Path("runs"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run of that name.", rich_help_panel=RECORD)
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files, too.", rich_help_panel=RECORD)
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the plan in place of training.", rich_help_panel=SCREEN)
    ] = False,
    progress: Progress = None,
    as_json: AsJson = False,
) -> None:
    """Train a task with one or many processes of this machine.

    [dim]shoal train digits.py
    shoal train digits.py --workers 4 --spares 1
    shoal train digits.py -w 4 --strategy data:via=ring --arg width=512 --epochs 3
    shoal train digits.py -w 4 --strategy ps:servers=2,sync=ssp:3 --explain[/dim]
    """
    from shoal.launch.runs import locate
    from shoal.launch.runs import train as start
    from shoal.spec import Cluster, Job

    given = {
        "batch_size": batch_size,
        "epochs": epochs,
        "max_steps": max_steps,
        "seed": seed,
        "accumulate": accumulate,
        "evaluate_every": evaluate_every,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    cluster = Cluster(workers=workers, spares=spares, threads=threads, device=device, port=port)
    arguments = parse_arguments(arg or ())
    if explain:
        from shoal.cli.explain import explain as show_plan

        job = Job(
            target=locate(target),
            args=arguments,
            strategy=strategy,
            cluster=cluster,
            slots=slots,
            overrides=overrides,
        )
        show_plan(job, ctx.obj, as_json=as_json)
        return
    run = start(
        target,
        strategy=strategy,
        cluster=cluster,
        slots=slots,
        args=arguments,
        name=name,
        runs=runs,
        overwrite=overwrite,
        progress=progress,
        output=sys.stderr if as_json else None,
        tensorboard=tensorboard,
        zygote=ctx.obj,
        **overrides,
    )
    if as_json:
        print(json.dumps({"run": str(run.folder), **run.results}))
