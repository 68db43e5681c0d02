"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.bars import BarClaim, BarFinding, BarVerdict
from benchmarks.compare import SpeedRow
from benchmarks.ordeal import Ordeal


def rows_table(rows: Sequence[SpeedRow], baseline: str = "ddp", title: str = "Speed") -> Table:
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


def ordeals_table(ordeals: Sequence[Ordeal]) -> Table:
    """Every run under faults, beside the same one without."""
    table = _plain_table("Under faults")
    for heading in ("run", "faults"):
        table.add_column(heading, overflow="fold")
    for heading in ("samples/s without", "with", "kept", "by timeline", "lost each", "next step", "worst"):
        table.add_column(heading, justify="right")
    for heading in ("audit", "weights", "same bits", "hangs named"):
        table.add_column(heading)
    for one in ordeals:
        table.add_row(
            one.name,
            ", ".join(f"{count} {kind}" for kind, count in sorted(one.faults.items())) or "none",
            f"{one.calm_samples_per_s:,.0f}",
            f"{one.samples_per_s:,.0f}",
            f"{one.kept:.1%}",
            f"{one.kept_by_timeline:.1%}",
            f"{one.lost_s:.2f} s",
            f"{one.to_next_step_s:.2f} s",
            f"{one.longest_to_next_step_s:.2f} s",
            _yes_or_no(one.is_audit_clean, "clean", "NOT CLEAN"),
            _yes_or_no(one.is_count_exact, "agree", "DISAGREE"),
            _yes_or_no(one.has_same_bits, "yes", "NO"),
            _yes_or_no(one.all_hung_named, "all", "NOT ALL"),
        )
    return table


def verdicts_table(verdicts: Sequence[BarVerdict | BarFinding | BarClaim]) -> Table:
    """Every bar: what was promised, what was measured, met or missed."""
    table = _plain_table("Bars: at least (≥) or at most (≤) so many times the peer")
    for heading in ("model", "what", "beside"):
        table.add_column(heading, overflow="fold")
    for heading in ("bar", "measured", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for verdict in verdicts:
        table.add_row(*_cells(verdict), _outcome(verdict))
    return table


def _plain_table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))


def _outcome(verdict: BarVerdict | BarFinding | BarClaim) -> str:
    if isinstance(verdict, BarVerdict) and verdict.bar.floor is None:
        return ""
    if isinstance(verdict, BarFinding) and verdict.ceiling.most is None:
        return ""
    return "[green]met[/green]" if verdict.met else "[red]missed[/red]"


def _cells(verdict: BarVerdict | BarFinding | BarClaim) -> list[str]:
    if isinstance(verdict, BarVerdict):
        return _verdict_cells(verdict)
    if isinstance(verdict, BarFinding):
        return _finding_cells(verdict)
    return [verdict.model, verdict.subject, "", "yes", "yes" if verdict.met else "no", ""]


def _yes_or_no(answer: bool | None, yes: str, no: str) -> str:
    return "–" if answer is None else yes if answer else no


def _verdict_cells(verdict: BarVerdict) -> list[str]:
    return [
        verdict.bar.model,
        f"speed of {verdict.bar.subject}",
        verdict.bar.peer,
        "none" if verdict.bar.floor is None else f"≥ {verdict.bar.floor:.2f}",
        f"{verdict.ratio:.2f}",
        _range(verdict.ratios, 2),
    ]


def _finding_cells(finding: BarFinding) -> list[str]:
    ceiling = finding.ceiling
    digits = 0 if ceiling.most is not None and ceiling.most >= 10 else 2
    return [
        ceiling.model,
        ceiling.subject,
        ceiling.peer,
        "none" if ceiling.most is None else f"≤ {ceiling.most:.{digits}f} {ceiling.unit}".rstrip(),
        f"{finding.value:.{digits}f} {ceiling.unit}".rstrip(),
        _range(finding.values, digits),
    ]


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}" if len(values) > 1 else ""


def _milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"
