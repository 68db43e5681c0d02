"""From what two runs left to the rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.verification.report import BITWISE, Row, Verdict
from shoal.verification.trials import Facts, Trial

if TYPE_CHECKING:
    from shoal.verification.difference import Difference, Tensors

REAL_MOVE = 1e-5
"""A relative move that is more than rounding: noise about a gradient of zero moves a parameter, or does not."""
STATE = "optimizer state"
_MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs that should have left the same."""

    title: str
    bound: Callable[[str], float | None] = lambda what: None
    """The most that is accepted for parameters, buffers or optimizer state; None to print without judging."""
    note: str = ""
    """What to know when reading the difference."""


def compare_trials(comparison: Comparison, ours: Trial, reference: Trial, facts: Facts) -> list[Row]:
    """One row each for parameters, buffers and optimizer state, as far as there are any."""
    from shoal.verification.difference import difference

    if ours.steps != reference.steps:
        note = f"{ours.steps} steps were taken, but {reference.steps} by one process"
        return [Row(comparison=comparison.title, what="steps", verdict=Verdict.MISMATCH, note=note)]
    kinds = [
        ("parameters", *_each(ours, reference, lambda name: name not in facts.buffers), lambda name: ""),
        ("buffers", *_each(ours, reference, lambda name: name in facts.buffers), _last_word),
        (STATE, ours.state(), reference.state(), _last_word),
    ]
    rows = [
        judge(comparison, what, difference(found, expected, kind_of))
        for what, found, expected, kind_of in kinds
        if found or expected
    ]
    if ours.skipped != reference.skipped:
        note = (
            f"{ours.skipped} were skipped for a gradient that is no number, but {reference.skipped} by the other"
        )
        rows.append(Row(comparison=comparison.title, what="skipped steps", verdict=Verdict.WARNING, note=note))
    return rows


def judge(comparison: Comparison, what: str, found: Difference) -> Row:
    """The row of one measured difference."""
    bound = comparison.bound(what)
    if bound is None:
        verdict = Verdict.NOT_JUDGED
    elif found.bitwise or (bound > BITWISE and found.relative <= bound):
        verdict = Verdict.EQUAL
    else:
        verdict = Verdict.MISMATCH
    return Row(
        comparison=comparison.title,
        what=what,
        measured=found.relative,
        bound=bound,
        verdict=verdict,
        worst=found.worst,
        note=comparison.note,
    )


def use_of_half(rows: list[Row], numbers: str) -> list[Row]:
    """Rows of a comparison with float32: to be equal in all bits would be a mistake here."""
    if any(row.measured for row in rows):
        return rows
    note = f"every bit is that of float32: nothing was computed in {numbers}"
    return [replace(row, verdict=Verdict.MISMATCH, note=note) for row in rows]


def movement(initial: Tensors, ours: Trial, reference: Trial, facts: Facts) -> list[Row]:
    """Did every parameter that the optimizer was given move? Those that did not are named."""
    from shoal.verification.difference import difference, same_bits

    final, alone = ours.model(), reference.model()
    still = [name for name in facts.trained if same_bits(initial[name], final[name])]
    moves = {name: difference({name: alone[name]}, {name: initial[name]}).relative for name in still}
    lost = [name for name in still if moves[name] > REAL_MOVE]
    unused = [name for name in still if name not in lost]
    title, what = "moved from the start", "trained parameters"
    rows = []
    if lost:
        note = f"did not move, but did in one process: {_names(lost)}"
        rows.append(Row(comparison=title, what=what, verdict=Verdict.MISMATCH, note=note))
    if unused:
        note = f"got no gradient to speak of in one process either, unused in this model? {_names(unused)}"
        rows.append(Row(comparison=title, what=what, verdict=Verdict.WARNING, note=note))
    if not rows:
        rows.append(Row(comparison=title, what=f"all {len(facts.trained)} trained", verdict=Verdict.EQUAL))
    if facts.untrained:
        note = f"not given to the optimizer, or frozen: {_names(facts.untrained)}"
        rows.append(Row(comparison=title, what="other parameters", verdict=Verdict.NOT_JUDGED, note=note))
    return rows


def _each(ours: Trial, reference: Trial, wanted: Callable[[str], bool]) -> tuple[Tensors, Tensors]:
    def chosen(tensors: Tensors) -> Mapping:
        return {name: tensor for name, tensor in tensors.items() if wanted(name)}

    return chosen(ours.model()), chosen(reference.model())


def _last_word(name: str) -> str:
    """`layer.weight/exp_avg` -> `exp_avg`, `norm.running_mean` -> `running_mean`; without a number: `keras_3` ->
    `keras_`."""
    return name.replace("/", ".").rpartition(".")[2].rstrip("0123456789")


def _names(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
