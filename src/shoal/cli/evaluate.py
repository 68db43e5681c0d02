"""`shoal evaluate`: how good a saved model is."""

from __future__ import annotations

import sys

import typer

from shoal.cli.arguments import (
    AsJson,
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
from shoal.cli.json_output import print_json


def evaluate(
    ctx: typer.Context,
    run: SavedModel,
    data: DataPart = "test",
    workers: ReadingWorkers = None,
    strategy: ReadingStrategy = None,
    threads: Threads = None,
    device: Device = "cpu",
    memory: Memory = None,
    trust: Trust = False,
    progress: Progress = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's model; the result is the same for any number of workers.

    [dim]shoal evaluate digits-20250131-120000 --workers 2
    shoal evaluate runs/demo --data train --json
    shoal evaluate large --strategy sharded --workers 4 --memory 2GiB[/dim]
    """
    from shoal.launch.saved import evaluate as start
    from shoal.observe import wording

    found = start(
        run,
        data=data,
        strategy=strategy,
        cluster=given(workers=workers, threads=threads, device=device, memory=memory),
        progress=progress,
        output=sys.stderr if as_json else None,
        trust=trust,
        zygote=ctx.obj,
    )
    if as_json:
        print_json({"run": run, "data": data, "samples": found.samples, "results": dict(found.results)})
        return
    print(f"{found.samples:,} {data} samples: {wording.results(found.results, data)}")
