"""A report as a table for the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.verification.report import BITWISE, Row, Verdict, VerifyReport, in_half

STYLES = {
    Verdict.EQUAL: "green",
    Verdict.MISMATCH: "bold red",
    Verdict.WARNING: "yellow",
    Verdict.NOT_JUDGED: "dim",
}
"""How each verdict looks."""


def report_table(report: VerifyReport) -> RenderableType:
    """Every comparison, what there is to say about them, then the verdict in one line."""
    strategy = f"{report.strategy}{in_half(report.precision)}"
    table = Table(title=f"{report.target}: {strategy}\n{_world(report)}")
    table.add_column("compared with")
    table.add_column("what", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for title, group in groupby(report.rows, key=lambda row: row.comparison):
        rows = list(group)
        table.add_row(
            title,
            "\n".join(row.what for row in rows),
            "\n".join(map(_measured, rows)),
            "\n".join(map(_bound, rows)),
            Text("\n").join(Text(row.verdict.value, style=STYLES[row.verdict]) for row in rows),
            end_section=True,
        )
    return Group(table, *_notes(report), verdict_line(report))


def verdict_line(report: VerifyReport) -> Text:
    """What it all means."""
    style = "bold green" if report.ok else "bold red"
    if report.replayed:
        ending = "came out again, bit for bit." if report.ok else "did NOT come out again."
        return Text(f"Run {report.replayed} {ending}", style=style)
    half = in_half(report.precision)
    subject = f"{report.strategy}{half} with {_world(report)}"
    if report.ok:
        return Text(f"{subject} computes what one process computes{half}.", style=style)
    number = len(report.mismatches)
    failed = "1 comparison" if number == 1 else f"{number} comparisons"
    return Text(f"{subject} does NOT compute what one process computes{half}: {failed} failed.", style=style)


def _notes(report: VerifyReport) -> list[Text]:
    """One line for each thing to know; what is true of several rows is said once."""
    lines: dict[tuple[str, str], Text] = {}
    for row in report.rows:
        where = f"{row.what}, most in {row.worst}" if row.verdict is Verdict.MISMATCH and row.worst else ""
        for text in filter(None, (where, row.note)):
            line = Text.assemble((f"{row.comparison}: ", STYLES[row.verdict]), text)
            lines.setdefault((row.comparison, text), line)
    return list(lines.values())


def _world(report: VerifyReport) -> str:
    workers = "1 worker" if report.workers == 1 else f"{report.workers} workers"
    slots = "1 slot" if report.slots == 1 else f"{report.slots} slots"
    return f"{workers}, {slots}, {report.steps} steps"


def _measured(row: Row) -> str:
    if row.measured is None:
        return ""
    return "equal bits" if row.measured == 0.0 and row.verdict is not Verdict.MISMATCH else f"{row.measured:.1e}"


def _bound(row: Row) -> str:
    if row.bound is None:
        return ""
    return "equal bits" if row.bound == BITWISE else f"{row.bound:.0e}"
