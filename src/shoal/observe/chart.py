"""The report's picture: the loss over the steps, and the test results beneath it."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import SpecError
from shoal.observe.disk import write_whole

INK, FAINT, BLUE, RED = "#333333", "#dddddd", "#3b6ea5", "#d1603d"
_METRICS = ("#2a8c6c", "#8a5aa8", "#b8862d", "#5b7083")
_AVERAGE = "average_"
"""How metrics of averaged weights begin."""
_LOG_SCALE_FROM = 30.0
"""How many times the smallest loss the largest must be before a logarithmic axis reads better."""

Curve = Sequence[tuple[int, float]]


def draw_chart(
    path: Path,
    title: str,
    losses: Curve,
    evaluations: Sequence[tuple[int, dict[str, float]]],
    parts: Mapping[str, Curve] | None = None,
) -> None:
    """Write the picture of a run's `(step, loss)` curve and its evaluations as a PNG; `parts` are the curves of
    what the loss is told with."""
    tests = {
        name: _finite([(step, found.get(name)) for step, found in evaluations]) for name in _names(evaluations)
    }
    test_loss = tests.pop("loss", [])
    # What the loss is made of is drawn with it; the table beneath the picture has the rest.
    shown_above = {"loss", *(parts or {})}
    tests = {name: one for name, one in tests.items() if name.removeprefix(_AVERAGE) not in shown_above}
    figure = new_figure(8, 5.6 if tests else 4.2)
    panels = figure.subplots(
        2 if tests else 1, squeeze=False, sharex=True, height_ratios=[2, 1][: 1 + bool(tests)]
    )
    told = {name: smooth(found) for name, curve in (parts or {}).items() if (found := _finite(curve))}
    _draw_loss(panels[0][0], _finite(losses), test_loss, told)
    panels[0][0].set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    if tests:
        _draw_metrics(panels[1][0], tests)
    panels[-1][0].set_xlabel("step", color=INK)
    save_figure(path, figure)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, which needs no screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("The picture needs matplotlib; install it: pip install shoal[report]") from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(path: Path, figure: Any) -> None:
    """Write it as a PNG, as a whole."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def smooth(curve: Curve) -> list[tuple[int, float]]:
    """The running mean over about a twentieth of the curve, each point in the middle of its stretch."""
    reach = max(1, len(curve) // 40)
    sums = [0.0]
    for _, value in curve:
        sums.append(sums[-1] + value)
    means = []
    for at, (step, _) in enumerate(curve):
        first, last = max(0, at - reach), min(len(curve), at + reach + 1)
        means.append((step, (sums[last] - sums[first]) / (last - first)))
    return means


def _draw_loss(axes: Any, losses: Curve, test_loss: Curve, parts: Mapping[str, Curve]) -> None:
    _dress(axes, "loss")
    smoothed = smooth(losses)
    if losses:
        axes.plot(*zip(*losses, strict=True), color=BLUE, linewidth=0.7, alpha=0.35)
        axes.plot(*zip(*smoothed, strict=True), color=BLUE, linewidth=1.8, label="training")
    if test_loss:
        axes.plot(*zip(*test_loss, strict=True), "o-", color=RED, linewidth=1, markersize=4.5, label="test")
    for at, (name, curve) in enumerate(parts.items()):
        color = _METRICS[at % len(_METRICS)]
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=1.2, linestyle="--", label=name)
    shown = [value for curve in (smoothed, test_loss, *parts.values()) for _, value in curve]
    if shown and min(shown) > 0 and max(shown) > _LOG_SCALE_FROM * min(shown):
        axes.set_yscale("log")
    if shown:
        _explain(axes)


def _draw_metrics(axes: Any, tests: dict[str, list[tuple[int, float]]]) -> None:
    """Those of averaged weights in the same colours, dashed."""
    _dress(axes, next(iter(tests)) if len(tests) == 1 else "test")
    plain = list(dict.fromkeys(name.removeprefix(_AVERAGE) for name in tests))
    for name, curve in tests.items():
        if curve:
            color = _METRICS[plain.index(name.removeprefix(_AVERAGE)) % len(_METRICS)]
            style, label = "o--" if name.startswith(_AVERAGE) else "o-", f"{name} {curve[-1][1]:.4g}"
            axes.plot(*zip(*curve, strict=True), style, color=color, linewidth=1, markersize=4.5, label=label)
    if any(tests.values()):
        _explain(axes)


def _explain(axes: Any) -> None:
    """Beside the curves: there is always room."""
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _dress(axes: Any, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _names(evaluations: Sequence[tuple[int, dict[str, float]]]) -> list[str]:
    return list(dict.fromkeys(name for _, found in evaluations for name in found))


def _finite(curve: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in curve if value is not None and math.isfinite(value)]
