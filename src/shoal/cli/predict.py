"""`shoal predict`: what a saved model says about each sample."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import arguments as option
from shoal.cli.arguments import given


def predict(
    ctx: typer.Context,
    run: option.SavedModel,
    out: Annotated[
        str,
        typer.Option("--out", "-o", help="The file to write: .jsonl, .csv or .npy; - for standard output."),
    ] = "-",
    data: option.DataPart = "test",
    new: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            help="New data: .npy, .csv, .jsonl, a folder of files, or - for the lines of standard input.",
            show_default=False,
        ),
    ] = None,
    workers: option.ReadingWorkers = None,
    strategy: option.ReadingStrategy = None,
    threads: option.Threads = None,
    device: option.Device = "cpu",
    memory: option.Memory = None,
    on: option.On = None,
    interface: option.Interface = None,
    ports: option.Ports = None,
    trust: option.Trust = False,
    progress: option.Progress = None,
) -> None:
    """Write the outputs of a run's model, one row per sample, in order, as they are done.

    [dim]shoal predict runs/demo --out predictions.jsonl --workers 2
    shoal predict runs/demo --out predictions.npy --input new.csv
    tail -f new.jsonl | shoal predict runs/demo --input -[/dim]
    """
    from shoal.launch.saved import predict as start
    from shoal.observe.wording import near

    path = start(
        run,
        out,
        data=data,
        input=new,
        strategy=strategy,
        cluster=given(
            workers=workers, threads=threads, device=device, memory=memory, on=on, interface=interface, ports=ports
        ),
        progress=progress,
        trust=trust,
        zygote=ctx.obj,
    )
    if out != "-":
        print(f"predictions are in {near(str(path))}")
