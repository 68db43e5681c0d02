"""A comparison of strategies as tables for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.bench.laps import BenchRow
from shoal.bench.report import ONE_PROCESS, BenchReport
from shoal.observe import wording

_LONGEST_NAME = 6
"""Of a strategy that may stand in a heading."""


def bench_table(report: BenchReport) -> RenderableType:
    """Every strategy beside one process, who was left out and why, then the finding in one line."""
    parts: list[RenderableType] = [_caption(report), Text(), _speeds(report), Text()]
    if report.left_out:
        parts += [_left_out(report), Text()]
    if report.is_broken_off:
        parts.append(Text("Broken off: only what was measured until then is shown.", style="yellow"))
    return Group(*parts, finding(report))


def finding(report: BenchReport) -> Text:
    """What it all means."""
    if not report.rows:
        return Text("No strategy was measured.", style="bold red")
    best = max(report.rows, key=lambda row: row.samples_per_s)
    if (ratio := report.ratio_to_one(best)) is None:
        return Text(f"{best.strategy} was fastest so far.", style="bold")
    if ratio < 1:
        return Text(
            f"No strategy is faster than one process here; {best.strategy} comes closest, with {ratio:.2f} of its "
            "speed.",
            style="bold yellow",
        )
    return Text(f"{best.strategy} is fastest: {ratio:.2f} times one process.", style="bold green")


def _caption(report: BenchReport) -> Text:
    threads = f"{wording.plural(report.threads, 'thread')} each"
    if report.threads_alone != report.threads:
        threads += f" (one process: {report.threads_alone})"
    world = f"{wording.plural(report.workers, 'worker')}, {threads}"
    length = f"{report.course.steps:,} steps of {report.batch_size:,} samples"
    rounds = f"medians of {report.rounds} rounds" if report.rounds > 1 else "1 round"
    return Text.assemble((wording.near(report.target), "bold"), f"\n{world}\n{length}, {rounds}")


def _speeds(report: BenchReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("strategy", overflow="fold")
    for heading in ("samples/s", "spread", "x one", _first_heading(report), "1st step", "memory", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    fastest = max((row.samples_per_s for row in report.rows), default=0.0)
    for row in report.all_rows:
        style = "dim" if row.strategy == ONE_PROCESS else "bold" if row.samples_per_s == fastest else ""
        table.add_row(*_texts(report, row), style=style)
    return table


def _first_heading(report: BenchReport) -> str:
    first = report.rows[0].strategy if report.rows else ""
    return f"x {first}" if 0 < len(first) <= _LONGEST_NAME else "x first"


def _texts(report: BenchReport, row: BenchRow) -> list[str]:
    return [
        row.strategy,
        wording.rate(row.samples_per_s),
        "–" if row.spread is None else f"{row.spread:.0%}",
        _ratio(report.ratio_to_one(row)),
        _ratio(report.ratio_to_first(row)),
        f"{row.first_step_s:.2f} s",
        wording.memory(row.peak_memory),
        "–" if row.loss != row.loss else wording.number(row.loss),
    ]


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _left_out(report: BenchReport) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for strategy, reason in report.left_out.items():
        table.add_row(f"  {strategy}", Text(reason, style="dim"))
    return Group(Text("left out"), table)
