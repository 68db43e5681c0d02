"""`shoal predict`: what a saved model says about each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import (
    DataPart,
    Device,
    Memory,
    Progress,
    ReadingStrategy,
    ReadingWorkers,
    SavedModel,
    Threads,
    Trust,
    given,
)


def predict(
    ctx: typer.Context,
    run: SavedModel,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file to write: .jsonl, .csv or .npy.", show_default=False),
    ],
    data: DataPart = "test",
    workers: ReadingWorkers = None,
    strategy: ReadingStrategy = None,
    threads: Threads = None,
    device: Device = "cpu",
    memory: Memory = None,
    trust: Trust = False,
    progress: Progress = None,
) -> None:
    """Write the outputs of a run's model, one row per sample, in order, as they are done.

    [dim]shoal predict runs/demo --out predictions.jsonl --workers 2
    shoal predict runs/demo --out predictions.npy --data train[/dim]
    """
    from shoal.launch.saved import predict as start
    from shoal.observe.wording import near

    path = start(
        run,
        out,
        data=data,
        strategy=strategy,
        cluster=given(workers=workers, threads=threads, device=device, memory=memory),
        progress=progress,
        trust=trust,
        zygote=ctx.obj,
    )
    print(f"predictions are in {near(str(path))}")
