"""`shoal evaluate`: how good a saved model is."""

from __future__ import annotations

import sys

import typer

from shoal.cli import arguments as option
from shoal.cli.arguments import given
from shoal.cli.json_output import print_json


def evaluate(
    ctx: typer.Context,
    run: option.SavedModel,
    data: option.DataPart = "test",
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
    as_json: option.AsJson = False,
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
        cluster=given(
            workers=workers, threads=threads, device=device, memory=memory, on=on, interface=interface, ports=ports
        ),
        progress=progress,
        output=sys.stderr if as_json else None,
        trust=trust,
        zygote=ctx.obj,
    )
    if as_json:
        print_json({"run": run, "data": data, "samples": found.samples, "results": dict(found.results)})
        return
    print(f"{found.samples:,} {data} samples: {wording.results(found.results, data)}")
