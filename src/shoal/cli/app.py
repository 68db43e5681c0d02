"""The `shoal` command: its verbs, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import shoal
from shoal.cli.bench import bench
from shoal.cli.checkpoint import checkpoint
from shoal.cli.doctor import doctor
from shoal.cli.evaluate import evaluate
from shoal.cli.export import export
from shoal.cli.failures import show_failure
from shoal.cli.federated import federated
from shoal.cli.help_texts import flowing
from shoal.cli.host import host
from shoal.cli.k8s import k8s
from shoal.cli.kv import kv
from shoal.cli.predict import predict
from shoal.cli.run import run as run_verb
from shoal.cli.scale import scale
from shoal.cli.slurm import slurm
from shoal.cli.submit import submit
from shoal.cli.train import train
from shoal.cli.verify import verify
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess

app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

TRAINING, CHECKING = "Training", "Checking and measuring"
app.command(rich_help_panel=TRAINING)(train)
app.command(rich_help_panel=TRAINING)(evaluate)
app.command(rich_help_panel=TRAINING)(predict)
app.command(rich_help_panel=TRAINING)(export)
app.command(
    "run",
    rich_help_panel=TRAINING,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(run_verb)
app.command(rich_help_panel=TRAINING)(scale)
app.command(rich_help_panel=TRAINING)(host)
app.command(rich_help_panel=TRAINING, context_settings={"ignore_unknown_options": True})(slurm)
app.command(rich_help_panel=TRAINING, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    k8s
)
app.command(rich_help_panel=TRAINING, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    submit
)
app.add_typer(checkpoint, name="checkpoint", rich_help_panel=TRAINING)
app.add_typer(federated, name="federated", rich_help_panel=TRAINING)
app.add_typer(kv, name="kv", rich_help_panel=TRAINING)
app.command(rich_help_panel=CHECKING)(verify)
app.command(rich_help_panel=CHECKING)(bench)
app.command(rich_help_panel=CHECKING)(doctor)
for _group in (app, checkpoint, federated, kv):
    for _verb in _group.registered_commands:
        assert _verb.callback is not None
        _verb.help = flowing(_verb.callback.__doc__ or "")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train one model with many processes: say what once, how and where in a word."""


def run(words: Sequence[str], zygote: ZygoteProcess | None = None) -> int:
    """Run one command line; its exit status. Workers are forked from `zygote` where there is one."""
    try:
        app(list(words), obj=zygote)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        status = 130
    except ShoalError as error:
        status = show_failure(error)
    return _say_goodbye(status)


def _say_goodbye(status: int) -> int:
    """Write what is left, quietly where nobody reads it any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would try once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
