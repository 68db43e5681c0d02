"""`shoal verify`: does a strategy compute what one process computes?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.arguments import (
    CLUSTER,
    TASK,
    AsJson,
    Compile,
    Convolutions,
    FactoryArguments,
    LossInPieces,
    MemoryFormat,
    PrivacyAsked,
    Products,
    Seed,
    Trust,
    Workers,
    parse_arguments,
)
from shoal.cli.json_output import print_json
from shoal.errors import SpecError
from shoal.spec.step_form import StepForm

if TYPE_CHECKING:
    from shoal.verification import ResultReport, VerifyReport


def verify(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="path.py:factory or package.module:factory.", show_default=False),
    ] = None,
    workers: Workers = 2,
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="What to verify: name:key=value,…", rich_help_panel=CLUSTER)
    ] = "data",
    slots: Annotated[
        int | None,
        typer.Option(help="Parts of a global batch; default one per worker.", rich_help_panel=CLUSTER),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps to train before comparing; default 20, or the whole task where results are compared.",
            rich_help_panel=TASK,
        ),
    ] = None,
    arg: FactoryArguments = None,
    seed: Seed = None,
    seeds: Annotated[
        int,
        typer.Option(help="Seeds to compare results over, where timing decides them.", rich_help_panel=TASK),
    ] = 5,
    precision: Annotated[
        str,
        typer.Option(
            help="What the model computes in, but for the comparison in float64: fp32, bf16, fp16, adaptive.",
            metavar="TYPE",
            rich_help_panel=TASK,
        ),
    ] = "fp32",
    privacy: PrivacyAsked = None,
    compile: Compile = None,
    memory_format: MemoryFormat = None,
    products: Products = None,
    convolutions: Convolutions = None,
    loss_in_pieces: LossInPieces = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Repeat this finished run, in place of TARGET."),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compare a strategy with one process: every parameter, buffer and number of the optimizer's state.

    Where timing decides (asynchronous servers), compare its results with those of synchronous training over
    several seeds. The exit status is 1 where they differ by more than is declared.

    [dim]shoal verify digits.py --workers 4
    shoal verify digits_conv.py --strategy data:batchnorm=sync
    shoal verify digits.py --strategy ps:sync=asp --seeds 5
    shoal verify --replay runs/demo[/dim]
    """
    from shoal.verification import replay_run
    from shoal.verification import verify as verify_task

    if (target is None) == (replay is None):
        raise SpecError("verify: name either a task (shoal verify digits.py) or a run (--replay RUN).")
    if trust and replay is None:
        raise SpecError("--trust is about the code of a run that is repeated; name that run with --replay.")
    report: VerifyReport | ResultReport
    with _progress_line() as progress:
        if replay is not None:
            report = replay_run(replay, trust=trust, zygote=ctx.obj, progress=progress)
        else:
            assert target is not None
            report = verify_task(
                target,
                workers=workers,
                strategy=strategy,
                slots=slots,
                steps=steps,
                args=parse_arguments(arg or ()),
                seed=seed,
                seeds=seeds,
                precision=precision,
                privacy=privacy or "none",
                form=StepForm(
                    compile=bool(compile),
                    memory_format=memory_format or "contiguous",
                    products=products or "torch",
                    convolutions=convolutions or "torch",
                    loss_in_pieces=bool(loss_in_pieces),
                ),
                zygote=ctx.obj,
                progress=progress,
            )
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def _progress_line() -> Iterator[Callable[[int, int, str], None]]:
    """One line that says which run is on, beside the results: they alone go to standard output."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda number, total, label: print(f"{number} of {total}: {label}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda number, total, label: status.update(f"{number} of {total}: {label}")


def _show(report: VerifyReport | ResultReport) -> None:
    from rich.console import Console

    from shoal.verification.report import VerifyReport
    from shoal.verification.result_table import result_table
    from shoal.verification.table import report_table

    table = report_table(report) if isinstance(report, VerifyReport) else result_table(report)
    Console(highlight=False).print(table)
