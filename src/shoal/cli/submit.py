"""`shoal submit`: have a task trained by a job of somebody's cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import SpecError


def submit(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="path.py:factory", show_default=False)],
    on: Annotated[
        str, typer.Option(help="Which cluster: ray, ray:http://HEAD:8265, and what ray takes besides.")
    ] = "ray",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show what the job writes, until it ends.")
    ] = True,
    runs: Annotated[
        str, typer.Option(help="Where the job keeps its run: a folder that the cluster's head has, too.")
    ] = "runs",
) -> None:
    """Train a task by a job of a Ray cluster, which goes on when this machine does not. Other options are those of
    shoal train; the task's sources travel with the job.

    [dim]shoal submit digits.py -w 4 --strategy ps --on ray:http://head:8265
    shoal submit digits.py -w 4 --no-wait[/dim]
    """
    from shoal.launch.engines.ray_jobs import RayJobs
    from shoal.launch.engines.ray_plan import RayWish

    engine, _, written = on.partition(":")
    if engine != "ray":
        raise SpecError(f"shoal submit: on={on} takes no jobs; the cluster must be ray, or ray:http://HEAD:8265.")
    _check_words(ctx, target)
    # Inside the cluster a job finds it by itself; how much of it is wanted is all that has to be said there.
    keys = ",".join(part for part in written.split(",") if "=" in part)
    jobs = RayJobs(RayWish.parse(written))
    words = [*ctx.args, "--runs", str(Path(runs).absolute())]
    job = jobs.submit(target, words, on=f"ray:{keys}" if keys else "ray")
    typer.echo(job)
    if wait:
        jobs.follow(job, lambda text: print(text, end="", file=sys.stdout, flush=True))


def _check_words(ctx: typer.Context, target: str) -> None:
    """Refuse here what `shoal train` does not know, before anything is sent."""
    verbs: Any = None if ctx.parent is None else ctx.parent.command
    verbs.commands["train"].make_context("train", [target, *ctx.args], parent=ctx.parent)
