"""`shoal bench`: which strategy is fastest on this task, here?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import arguments as option
from shoal.cli.arguments import CLUSTER, RECORD, TASK, given, parse_arguments
from shoal.cli.json_output import print_json
from shoal.errors import FAILED, INTERRUPTED, SpecError

if TYPE_CHECKING:
    from shoal.bench import BenchReport

MEASURE = "How it is measured"
_DRAWN_EVERY_S = 0.25


def bench(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TASK", help="path.py:factory or package.module:factory.", show_default=False),
    ],
    workers: option.Workers = 2,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            "-s",
            help="Which, with commas: data,ps:servers=2,sync=asp; default all that can train this task.",
            rich_help_panel=CLUSTER,
            show_default=False,
        ),
    ] = None,
    threads: option.Threads = None,
    device: option.Device = "cpu",
    rounds: Annotated[
        int, typer.Option(help="Measure each strategy so often, all in turn.", rich_help_panel=MEASURE)
    ] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps that count in each run; default as many as fit --seconds.", rich_help_panel=MEASURE
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="How long one process should take for a run; default 3. All take as many steps as it does.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    arg: option.FactoryArguments = None,
    batch_size: option.BatchSize = None,
    seed: option.Seed = None,
    precision: Annotated[
        str,
        typer.Option(help="What the model computes in.", metavar="fp32|bf16|fp16|adaptive", rich_help_panel=TASK),
    ] = "fp32",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the figures (bench.json) and a picture (bench.png) in this folder.",
            rich_help_panel=RECORD,
            show_default=False,
        ),
    ] = None,
    as_json: option.AsJson = False,
) -> None:
    """Compare strategies on your task: speed, first step, memory and loss, beside one process.

    All take the same steps on the same batches, in fresh processes, in turn.
    What cannot train the task is listed with the reason.
    Ctrl-C shows what was measured until then.

    [dim]shoal bench digits.py
    shoal bench digits.py -w 4 -s data,sharded,ps:servers=2,sync=asp
    shoal bench gpt.py --steps 50 --rounds 5 --out compared[/dim]
    """
    from shoal.bench.comparison import SECONDS, BenchOrder, chosen_strategies, compare_strategies
    from shoal.launch.targets import locate
    from shoal.spec import Cluster

    if steps is not None and seconds is not None:
        raise SpecError("bench: --steps and --seconds both say how long a run is; give one of them.")
    order = BenchOrder(
        target=locate(target),
        strategies=chosen_strategies(strategies),
        cluster=Cluster(workers=workers, threads=threads, device=device),
        args=parse_arguments(arg or ()),
        overrides=given(batch_size=batch_size, seed=seed),
        precision=precision,
        rounds=rounds,
        steps=steps,
        seconds=SECONDS if seconds is None else seconds,
    )
    if out is not None:
        _prepare(out)
    with _progress_bar() as progress:
        report = compare_strategies(order, zygote=ctx.obj, progress=progress)
    if out is not None:
        _keep(report, out)
    _show(report, as_json=as_json)
    if report.is_broken_off:
        raise typer.Exit(INTERRUPTED)
    if not report.rows:
        raise typer.Exit(FAILED)


def _prepare(out: Path) -> None:
    """Refuse at once what could not be kept after minutes of measuring."""
    from shoal.observe.chart import new_figure
    from shoal.observe.disk import writing

    new_figure(1, 1)
    if out.exists() and not out.is_dir():
        raise SpecError(f"bench: --out {out} is a file; name a folder.")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


def _keep(report: BenchReport, out: Path) -> None:
    from shoal.bench.picture import draw_bench
    from shoal.observe.disk import write_whole
    from shoal.observe.strict_json import to_json

    write_whole(out / "bench.json", to_json(report.to_dict(), indent=2) + "\n")
    draw_bench(out / "bench.png", report)


def _show(report: BenchReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
        return
    from rich.console import Console

    from shoal.bench.table import bench_table

    Console(highlight=False).print(bench_table(report))


@contextmanager
def _progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal, a line for each run elsewhere; the results alone go to standard output."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        told: list[str] = []

        def tell(done: float, label: str) -> None:
            if told[-1:] != [label]:
                told.append(label)
                print(f"{done:4.0%}  {label}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    # Without its thread: what is measured has the machine for itself.
    columns = (
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        bar = shown.add_task("", total=1.0)
        drawn_at = 0.0

        def draw(done: float, label: str) -> None:
            nonlocal drawn_at
            shown.update(bar, completed=done, description=label)
            if time.monotonic() >= drawn_at + _DRAWN_EVERY_S:
                drawn_at = time.monotonic()
                shown.refresh()

        yield draw
