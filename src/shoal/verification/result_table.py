"""Results over seeds as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.observe import wording
from shoal.verification.noise import RULE, Spread
from shoal.verification.report import Verdict, in_half
from shoal.verification.result_report import Pushes, ResultReport, SeedRun
from shoal.verification.table import STYLES

_MOST_SENTENCES = 3


def result_table(report: ResultReport) -> RenderableType:
    """Every seed, the spread, what became of the updates, then the verdict in one line."""
    parts: list[RenderableType] = [_seeds(report)]
    if _can_be_compared(report):
        parts.append(_spreads(report))
    return Group(*parts, *_notes(report), result_line(report))


def _can_be_compared(report: ResultReport) -> bool:
    """How well it trains is no question where it does not train."""
    return bool(report.contests) and not (report.lost_runs or report.lost_references)


def result_line(report: ResultReport) -> Text:
    """What it all means."""
    subject = f"{report.strategy}{in_half(report.precision)} with {wording.plural(report.workers, 'worker')}"
    style = "bold green" if report.ok else "bold red"
    return Text(f"{subject} {_finding(report)}", style=style)


def _finding(report: ResultReport) -> str:
    judged = [contest for contest in report.contests if contest.verdict is not Verdict.NOT_JUDGED]
    runs = wording.plural(len(report.ours), "run")
    if report.lost_references:
        number = len(report.lost_references)
        return f"cannot be judged: {report.reference} itself did not train in {number} of {runs}; see to the task."
    if report.lost_runs:
        return f"DID NOT TRAIN in {len(report.lost_runs)} of {runs}, where {report.reference} did."
    if report.miscounted:
        return f"LOST or repeated updates in {len(report.miscounted)} of {runs}."
    unsure = any(contest.is_noise for contest in judged)
    ending = "trains WORSE than" if report.worse else "cannot be told from" if unsure else "trains as well as"
    details = ", ".join(f"{contest.what} {contest.words}" for contest in judged)
    return f"{ending} {report.reference}: {details}."


def _seeds(report: ResultReport) -> Table:
    table = Table(title=f"{report.target}: {report.strategy}{in_half(report.precision)}\n{_world(report)}")
    names = list(dict.fromkeys(name for run in (*report.ours, *report.references) for name in run.results))
    table.add_column("seed", justify="right", no_wrap=True)
    for name in names:
        table.add_column(f"{name}\n{_family(report)} / {report.reference}", justify="right")
    has_delays = any(run.pushes for run in report.ours)
    if has_delays:
        table.add_column("delay\nmean / most", justify="right", no_wrap=True)
    table.add_column("ended\n")
    for one, other in zip(report.ours, report.references, strict=True):
        cells = [f"{wording.number(one.results.get(n))} / {wording.number(other.results.get(n))}" for n in names]
        delay = [f"{one.pushes.delay_mean:.2f} / {one.pushes.delay_max}" if one.pushes else "–"] * has_delays
        table.add_row(str(one.seed), *cells, *delay, _ending(one))
    return table


def _spreads(report: ResultReport) -> Table:
    table = Table(title=f"over {wording.plural(len(report.ours), 'seed')}")
    for heading in ("", "", "mean", "deviation", "lowest", "highest"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("verdict")
    for contest in report.contests:
        is_judged = contest.verdict is not Verdict.NOT_JUDGED
        words = Text(contest.words if is_judged else f"({contest.words})", STYLES[contest.verdict])
        noise = Text(f"noise {contest.difference(contest.noise)}", "dim")
        table.add_row(contest.what, _family(report), *_figures(contest.ours), words)
        table.add_row("", report.reference, *_figures(contest.reference), noise, end_section=True)
    return table


def _notes(report: ResultReport) -> list[Text]:
    notes = []
    if pushes := [run.pushes for run in report.ours if run.pushes is not None]:
        notes.append(Text(_fate(pushes)))
    sentences = [
        f"seed {run.seed}, {name}: {run.trouble}"
        for name, runs in ((report.strategy, report.lost_runs), (report.reference, report.lost_references))
        for run in runs[:_MOST_SENTENCES]
    ]
    notes += [Text(sentence, style=STYLES[Verdict.MISMATCH]) for sentence in sentences]
    if _can_be_compared(report):
        notes.append(Text(RULE, style="dim"))
    return notes


def _fate(pushes: Sequence[Pushes]) -> str:
    """What became of all updates of all runs."""
    delay = mean(run.delay_mean for run in pushes)
    most = max(run.delay_max for run in pushes)
    counts = [(sum(getattr(run, kind) for run in pushes), kind) for kind in ("applied", "duplicate", "late")]
    audit = "every audit is clean" if all(run.clean for run in pushes) else "NOT every audit is clean"
    return (
        f"A gradient arrived {delay:.2f} updates late on average, {most} at most. "
        f"Pushes: {', '.join(f'{count:,} {kind}' for count, kind in counts)}; {audit}."
    )


def _ending(run: SeedRun) -> Text:
    if run.trouble:
        return Text("failed" if run.failed else "diverged", style=STYLES[Verdict.MISMATCH])
    if run.rollbacks:
        return Text(f"rolled back {run.rollbacks}x", style=STYLES[Verdict.WARNING])
    return Text("well")


def _figures(spread: Spread) -> tuple[str, ...]:
    return tuple(map(wording.number, (spread.mean, spread.deviation, spread.low, spread.high)))


def _family(report: ResultReport) -> str:
    return report.strategy.partition(":")[0]


def _world(report: ResultReport) -> str:
    run = max(report.ours, key=lambda run: run.steps)
    return f"{wording.plural(report.workers, 'worker')}, {run.steps:,} steps, {run.samples:,} samples"
