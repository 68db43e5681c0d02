"""Bounds, verdicts and the report's words."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from shoal.verification.bounds import (
    NARROWED_BOUND,
    NORMALISED_BOUND,
    SUM_BOUND,
    SYNCHRONISED_BOUND,
    first_step_bound,
)
from shoal.verification.difference import Difference
from shoal.verification.judging import Comparison, judge, use_of_half
from shoal.verification.report import BITWISE, Row, Verdict, VerifyReport
from shoal.verification.table import report_table


@pytest.mark.parametrize(
    ("bound", "found", "verdict"),
    [
        (BITWISE, Difference(0.0, True), Verdict.EQUAL),
        (BITWISE, Difference(0.0, False, "w"), Verdict.MISMATCH),
        (BITWISE, Difference(1e-9, False, "w"), Verdict.MISMATCH),
        (1e-3, Difference(9e-4, False, "w"), Verdict.EQUAL),
        (1e-3, Difference(2e-3, False, "w"), Verdict.MISMATCH),
        (1e-3, Difference(math.inf, False, "w"), Verdict.MISMATCH),
        (None, Difference(0.5, False, "w"), Verdict.NOT_JUDGED),
    ],
)
def test_verdict(bound: float | None, found: Difference, verdict: Verdict):
    row = judge(
        Comparison(title="one process", bound=lambda what: bound, note="keep in mind"), "parameters", found
    )

    assert row.verdict is verdict
    assert (row.worst, row.note) == (found.worst, "keep in mind")


@pytest.mark.parametrize(
    ("what", "optimizer", "synchronised", "bound"),
    [
        ("parameters", "SGD", False, SUM_BOUND),
        ("parameters", "SGD", True, SYNCHRONISED_BOUND),
        ("parameters", "AdamW", False, NORMALISED_BOUND),
        ("parameters", "SomebodysOwn", False, NORMALISED_BOUND),
        ("optimizer state", "AdamW", False, SUM_BOUND),
        ("buffers", "AdamW", True, SYNCHRONISED_BOUND),
    ],
)
def test_what_is_proportional_to_the_gradient_is_judged_tightly(
    what: str, optimizer: str, synchronised: bool, bound: float
):
    assert first_step_bound(what, optimizer, synchronised=synchronised) == bound


def test_layers_cut_by_width_in_half_precision_have_a_bound_of_their_own():
    for synchronised in (False, True):
        found = first_step_bound("optimizer state", "SGD", synchronised=synchronised, narrowed=True)
        assert found == NARROWED_BOUND
    assert first_step_bound("parameters", "AdamW", synchronised=False, narrowed=True) == NORMALISED_BOUND


def test_half_precision_that_gives_the_bits_of_float32_was_not_used():
    differing = [_row(Verdict.NOT_JUDGED, 0.0), _row(Verdict.NOT_JUDGED, 0.01)]
    assert use_of_half(differing, "bf16") == differing
    for row in use_of_half([_row(Verdict.NOT_JUDGED, 0.0)], "bf16"):
        assert row.verdict is Verdict.MISMATCH and "nothing was computed in bf16" in row.note


def _report(*rows: Row, precision: str = "fp32") -> VerifyReport:
    return VerifyReport(
        target="digits.py", strategy="data", workers=2, slots=2, steps=20, rows=rows, precision=precision
    )


def _row(verdict: Verdict, measured: float | None = None) -> Row:
    return Row(comparison="one process", what="parameters", measured=measured, bound=BITWISE, verdict=verdict)


def test_warnings_and_printed_rows_are_no_mismatch():
    assert _report(_row(Verdict.EQUAL, 0.0), _row(Verdict.WARNING), _row(Verdict.NOT_JUDGED, 0.1)).ok
    assert not _report(_row(Verdict.EQUAL, 0.0), _row(Verdict.MISMATCH, 0.1)).ok


def test_report_is_valid_json_even_with_an_infinite_difference():
    text = json.dumps(_report(_row(Verdict.MISMATCH, math.inf)).to_dict(), allow_nan=False)

    assert json.loads(text)["rows"][0] == {
        "comparison": "one process",
        "what": "parameters",
        "measured": "infinite",
        "bound": 0.0,
        "verdict": "mismatch",
        "worst": "",
        "note": "",
    }
    assert json.loads(text)["ok"] is False


@pytest.mark.parametrize("verdict", [Verdict.EQUAL, Verdict.MISMATCH])
def test_table_ends_with_the_verdict(verdict: Verdict):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report_table(_report(_row(verdict, 0.0 if verdict is Verdict.EQUAL else 0.25))))
    lines = console.export_text().strip().splitlines()

    assert ("does NOT compute" in lines[-1]) == (verdict is Verdict.MISMATCH)
    assert any("2.5e-01" in line for line in lines) == (verdict is Verdict.MISMATCH)


def test_the_table_fits_a_narrow_terminal_and_says_what_it_computed_in():
    rows = [
        Row(
            comparison="one process in bf16, the same slots and micro-batches, first step",
            what=what,
            measured=0.01,
            bound=NARROWED_BOUND,
            verdict=Verdict.EQUAL,
        )
        for what in ("parameters", "optimizer state")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report_table(_report(*rows, precision="bf16")))
    lines = console.export_text().splitlines()

    assert max(map(len, lines)) <= 80
    assert "data in bf16" in lines[0] and lines[-1].endswith("in bf16.")
    first, second = (next(number for number, line in enumerate(lines) if row.what in line) for row in rows)
    assert second == first + 1, "what is long beside them does not tear them apart"
