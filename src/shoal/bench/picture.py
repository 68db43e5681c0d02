"""A comparison of strategies as a picture: how fast each is, and how much its rounds differ."""

from __future__ import annotations

from pathlib import Path

from shoal.bench.report import BenchReport
from shoal.observe import wording
from shoal.observe.chart import BLUE, FAINT, INK, RED, new_figure, save_figure


def draw_bench(path: Path, report: BenchReport) -> None:
    """Write one bar for each strategy, with the range of its rounds, as a PNG."""
    rows = report.all_rows
    figure = new_figure(8, 1.1 + 0.42 * len(rows))
    axes = figure.subplots()
    speeds = [row.samples_per_s for row in rows]
    ranges = [[lap.samples_per_s for lap in row.laps] for row in rows]
    below = [speed - min(each) for speed, each in zip(speeds, ranges, strict=True)]
    above = [max(each) - speed for speed, each in zip(speeds, ranges, strict=True)]
    colors = [FAINT if row is report.alone else BLUE for row in rows]
    axes.barh(
        range(len(rows)),
        speeds,
        height=0.62,
        color=colors,
        xerr=[below, above],
        ecolor=INK,
        error_kw={"elinewidth": 1},
    )
    for number, row in enumerate(rows):
        ratio = report.ratio_to_one(row)
        label = wording.rate(row.samples_per_s) + (f"  ×{ratio:.2f}" if ratio is not None else "")
        reach = max(ranges[number])
        axes.annotate(
            label, (reach, number), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    if report.alone is not None:
        axes.axvline(report.alone.samples_per_s, color=RED, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [row.strategy for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("samples/s", color=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    title = f"{Path(report.target.partition(':')[0]).name}, {wording.plural(report.workers, 'worker')}"
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    save_figure(path, figure)
