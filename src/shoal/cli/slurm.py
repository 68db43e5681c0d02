"""`shoal slurm`: have Slurm train a task, and go on where it was when it is put back into the queue."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import arguments as option
from shoal.errors import LaunchError, SpecError

_SUBMIT_S = 10.0
ALLOCATION = "What is asked for"


def slurm(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="As of shoal train: path.py:factory.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="OPTIONS", help="Those of shoal train, which are handed on.", show_default=False),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "-N", min=1, help="How many hosts.", rich_help_panel=ALLOCATION)
    ] = 1,
    hosts: Annotated[
        str,
        typer.Option(
            help="At least and at most so many, in place of --nodes: as many as Slurm has.",
            metavar="LEAST:MOST",
            rich_help_panel=ALLOCATION,
        ),
    ] = "",
    time: Annotated[
        str,
        typer.Option(
            "--time", "-t", help="How long at most: 30 (minutes), 2:00:00, 1-12.", rich_help_panel=ALLOCATION
        ),
    ] = "",
    partition: Annotated[
        str, typer.Option("--partition", "-p", help="Of which partition.", rich_help_panel=ALLOCATION)
    ] = "",
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs of each host; a worker for each.", rich_help_panel=ALLOCATION)
    ] = 0,
    cpus: Annotated[
        int,
        typer.Option(min=0, help="Cores of each host; default as the partition says.", rich_help_panel=ALLOCATION),
    ] = 0,
    option_of_sbatch: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch",
            help="Any other option of sbatch, as --sbatch=--mem=8G; repeatable.",
            rich_help_panel=ALLOCATION,
        ),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option(
            help="Let Slurm put the job back into the queue when it takes its hosts away; it then goes on after "
            "its newest checkpoint.",
            rich_help_panel=ALLOCATION,
        ),
    ] = True,
    name: Annotated[
        str, typer.Option(help="The run's name; default target and job.", rich_help_panel=option.RECORD)
    ] = "",
    runs: option.Runs = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
) -> None:
    """Write a batch script that trains a task on hosts of Slurm's, and submit it.

    Run in a folder that all hosts see. Options that are not listed here are those of shoal train; without
    --checkpoint there is one every 5 minutes.

    [dim]shoal slurm digits.py --nodes 2 --time 2:00:00
    shoal slurm digits.py --nodes 4 --gpus 8 --partition a100 --epochs 20 --checkpoint every=10m
    shoal slurm digits.py --nodes 2 --dry-run[/dim]
    """
    train = [target, *(arguments or ())]
    least, most = _limits(hosts, nodes)
    train += ["--hosts", hosts] if hosts else []
    head = _head(
        target,
        nodes=f"{least}-{most}" if hosts else str(nodes),
        time=time,
        partition=partition,
        gpus=gpus,
        cpus=cpus,
        requeue=requeue,
    )
    _check_others(option_of_sbatch or ())
    head += option_of_sbatch or ()
    if gpus:
        train += [] if _says(train, "--workers", "-w") else ["--workers", str(most * gpus)]
        train += [] if _says(train, "--device") else ["--device", "cuda"]
    if requeue and not _says(train, "--checkpoint"):
        train += ["--checkpoint", "every=5m"]
    run = shlex.quote(name) if name else f'"{_stem(target)}-slurm-$SLURM_JOB_ID"'
    script = _script(head, train, run, runs)
    if dry_run:
        typer.echo(script, nl=False)
        return
    job = _submit(script)
    typer.echo(f"submitted: Slurm job {job}; its output goes to {_stem(target)}-slurm-{job}.out")


def _limits(hosts: str, nodes: int) -> tuple[int, int]:
    """Between how many hosts the run may have."""
    if not hosts:
        return nodes, nodes
    least, _, most = hosts.partition(":")
    if nodes != 1 or not (least.isdecimal() and most.isdecimal()):
        raise SpecError(
            f"--hosts takes limits such as 2:8, in place of --nodes, found {hosts!r} and --nodes {nodes}."
        )
    return int(least), int(most)


def _head(target: str, *, nodes: str, time: str, partition: str, gpus: int, cpus: int, requeue: bool) -> list[str]:
    """What sbatch is asked for."""
    stem = _stem(target)
    wishes = [f"--job-name=shoal-{stem}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    wishes += [f"--time={time}"] if time else []
    wishes += [f"--partition={partition}"] if partition else []
    wishes += [f"--gpus-per-node={gpus}"] if gpus else []
    wishes += [f"--cpus-per-task={cpus}"] if cpus else []
    wishes += ["--requeue" if requeue else "--no-requeue"]
    # An earlier try's output stays, and what it printed before stands before it.
    wishes += ["--open-mode=append", f"--output={stem}-slurm-%j.out"]
    for wish in wishes:
        if any(letter.isspace() for letter in wish):
            raise SpecError(f"sbatch takes no spaces in {wish!r}; leave them out.")
    return wishes


def _script(head: Sequence[str], train: Sequence[str], run: str, runs: Path) -> str:
    shoal = shlex.join([sys.executable, "-P", "-m", "shoal.cli", "train"])
    kept = shlex.join(["--runs", str(runs)])
    lines = ["#!/bin/bash", *(f"#SBATCH {one}" for one in head), ""]
    lines += [
        "# Slurm counts how often it has put this job back into the queue: then it goes on where it was.",
        f"exec {shoal} {shlex.join(train)} --name {run} {kept} --plain ${{SLURM_RESTART_COUNT:+--again}}",
    ]
    return "\n".join(lines) + "\n"


def _submit(script: str) -> str:
    """The number of the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=_SUBMIT_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            "sbatch is not installed on this host; submit from a host of the cluster, or print the script with "
            "--dry-run and submit it there."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch did not answer within {_SUBMIT_S:.0f} s; see whether sinfo does.") from None
    if done.returncode:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]


def _check_others(others: Sequence[str]) -> None:
    for one in others:
        if not one.startswith("-") or "\n" in one:
            raise SpecError(f"--sbatch takes an option of sbatch's, as --sbatch=--account=mine, found {one!r}.")


def _says(words: Sequence[str], *flags: str) -> bool:
    return any(word.partition("=")[0] in flags for word in words)


def _stem(target: str) -> str:
    """What a target is called in names of files and jobs."""
    return "".join(letter if letter.isalnum() else "-" for letter in Path(target.partition(":")[0]).stem)
