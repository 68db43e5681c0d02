"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from shoal.bench.bars import Finding, Verdict
from shoal.bench.compare import Row


def rows_table(rows: Sequence[Row], baseline: str = "ddp", title: str = "Speed") -> Table:
    """Every variant's speed, and how many times that of the `baseline` on the same model."""
    table = _plain_table(f"{title}, medians over rounds")
    for heading in ("model", "variant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("procs", "step", "spread", "samples/s", f"x {baseline}", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    peers = {(row.model, row.processes): row.samples_per_s for row in rows if row.variant == baseline}
    for place, row in enumerate(rows):
        last_of_model = place + 1 == len(rows) or rows[place + 1].model != row.model
        table.add_row(
            row.model,
            row.variant,
            str(row.processes),
            _milliseconds(row.step_s),
            f"{row.spread:.0%}",
            f"{row.samples_per_s:,.0f}",
            f"{row.samples_per_s / peer:.2f}" if (peer := peers.get((row.model, row.processes))) else "",
            f"{row.loss:.4f}",
            end_section=last_of_model,
        )
    return table


def verdicts_table(verdicts: Sequence[Verdict | Finding]) -> Table:
    """Every bar: what was promised, what was measured, met or missed."""
    table = _plain_table("Bars: at least (≥) or at most (≤) so many times the peer")
    for heading in ("model", "what", "beside"):
        table.add_column(heading, overflow="fold")
    for heading in ("bar", "measured", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for verdict in verdicts:
        cells = _finding_cells(verdict) if isinstance(verdict, Finding) else _verdict_cells(verdict)
        table.add_row(*cells, "[green]met[/green]" if verdict.met else "[red]missed[/red]")
    return table


def _plain_table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))


def _verdict_cells(verdict: Verdict) -> list[str]:
    return [
        verdict.bar.model,
        f"speed of {verdict.bar.subject}",
        verdict.bar.peer,
        f"≥ {verdict.bar.floor:.2f}",
        f"{verdict.ratio:.2f}",
        _range(verdict.ratios, 2),
    ]


def _finding_cells(finding: Finding) -> list[str]:
    ceiling = finding.ceiling
    digits = 2 if ceiling.most < 10 else 0
    return [
        ceiling.model,
        ceiling.subject,
        ceiling.peer,
        f"≤ {ceiling.most:.{digits}f} {ceiling.unit}".rstrip(),
        f"{finding.value:.{digits}f} {ceiling.unit}".rstrip(),
        _range(finding.values, digits),
    ]


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}" if len(values) > 1 else ""


def _milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"
