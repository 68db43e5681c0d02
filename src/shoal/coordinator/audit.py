"""The audit at the end of a run: was every cell applied, once, in every shard?"""

from __future__ import annotations

from itertools import islice
from typing import Any

from shoal.coordinator.plan import JobPlan
from shoal.coordinator.reports import ShardReport
from shoal.ledger.cells import CellSet
from shoal.ps.consistency import Mode, parse_sync
from shoal.ps.messages import Outcome

SHOWN = 10
"""Missing cells that are listed by number."""


def audit(plan: JobPlan, shards: dict[int, ShardReport]) -> dict[str, Any]:
    """What became of every cell, by shard, as plain data.

    `clean` where each was applied exactly once; a quorum may leave some out.
    """
    rows = [_row(plan, shard, shards.get(shard)) for shard in range(plan.num_shards)]
    may_drop = parse_sync(plan.sync).mode is Mode.QUORUM
    return {
        "cells": plan.num_cells - plan.first_cell,
        "samples": plan.num_samples,
        "clean": all(row["more_than_once"] == 0 and (row["never"] == 0 or may_drop) for row in rows),
        "shards": rows,
    }


def _row(plan: JobPlan, shard: int, report: ShardReport | None) -> dict[str, Any]:
    expected = plan.num_cells - plan.first_cell
    if report is None:
        before = CellSet(below=plan.first_cell)
        report = ShardReport(cells=before, num_cells=len(before), tally={}, delay_mean=0.0)
    never = plan.num_cells - report.num_cells
    missing = (cell for cell in report.cells.missing(plan.num_cells) if cell >= plan.first_cell)
    applied = report.tally.get("cells", expected - never)
    return {
        "shard": shard,
        "once": expected - never,
        "more_than_once": max(0, applied - (expected - never)),
        "never": never,
        "missing": list(islice(missing, min(SHOWN, never))),
        "delay_mean": report.delay_mean,
        "delay_max": report.delay_max,
    } | _pushes(report.tally)


def _pushes(tally: Any) -> dict[str, int]:
    return {
        f"{outcome}_pushes": tally.get(outcome, 0)
        for outcome in (Outcome.APPLIED, Outcome.DUPLICATE, Outcome.LATE)
    }
