"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from shoal.bench.bars import Verdict
from shoal.bench.compare import Row


def rows_table(rows: Sequence[Row], baseline: str = "ddp") -> Table:
    """Every variant's speed, and how many times that of the `baseline` on the same model."""
    table = Table(title="Speed, medians over rounds")
    table.add_column("model")
    table.add_column("variant")
    for heading in ("processes", "step", "spread", "samples/s", f"x {baseline}", "loss"):
        table.add_column(heading, justify="right")
    speeds = {row.model: row.samples_per_s for row in rows if row.variant == baseline}
    for place, row in enumerate(rows):
        last_of_model = place + 1 == len(rows) or rows[place + 1].model != row.model
        table.add_row(
            row.model,
            row.variant,
            str(row.processes),
            _milliseconds(row.step_s),
            f"{row.spread:.0%}",
            f"{row.samples_per_s:,.0f}",
            f"{row.samples_per_s / speeds[row.model]:.2f}" if row.model in speeds else "",
            f"{row.loss:.4f}",
            end_section=last_of_model,
        )
    return table


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Every bar: what was promised, what was measured, met or missed."""
    table = Table(title="Bars, times the peer's samples/s")
    table.add_column("model")
    table.add_column("variant")
    table.add_column("peer")
    for heading in ("at least", "measured", "lowest to highest"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for verdict in verdicts:
        table.add_row(
            verdict.bar.model,
            verdict.subject,
            verdict.bar.peer,
            f"{verdict.bar.floor:.2f}",
            f"{verdict.ratio:.2f}",
            f"{min(verdict.ratios):.2f} to {max(verdict.ratios):.2f}",
            "[green]met[/green]" if verdict.met else "[red]missed[/red]",
        )
    return table


def _milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"
