"""The audit at the end of a run: was every cell applied, once, in every shard?"""

from __future__ import annotations

from itertools import islice
from typing import Any

from shoal.coordinator.plan import JobPlan
from shoal.coordinator.reports import ShardReport
from shoal.ledger.cells import CellSet
from shoal.ps.consistency import Mode, parse_sync
from shoal.ps.messages import PushOutcome

SHOWN = 10
"""Missing cells that are listed by number."""


def audit(plan: JobPlan, shards: dict[int, ShardReport]) -> dict[str, Any]:
    """What became of every cell, by shard, as plain data; and of those that the run went on from.

    `clean` where each was applied exactly once; a quorum may leave some out.
    """
    rows = [_row(plan, shard, shards.get(shard)) for shard in range(plan.num_shards)]
    may_drop = parse_sync(plan.sync).mode is Mode.QUORUM
    return {
        "cells": plan.past.cells + plan.num_cells,
        "samples": plan.past.samples + plan.num_samples,
        "clean": plan.past.is_clean
        and all(row["more_than_once"] == 0 and (row["never"] == 0 or may_drop) for row in rows),
        "shards": rows,
    }


def _row(plan: JobPlan, shard: int, report: ShardReport | None) -> dict[str, Any]:
    if report is None:
        report = ShardReport(cells=CellSet(), num_cells=0, tally={}, delay_mean=0.0)
    never = plan.num_cells - report.num_cells
    applied = report.tally.get("cells", report.num_cells)
    return {
        "shard": shard,
        "once": plan.past.cells + report.num_cells,
        "more_than_once": max(0, applied - report.num_cells),
        "never": never,
        "missing": list(islice(report.cells.missing(plan.num_cells), min(SHOWN, never))),
        "delay_mean": report.delay_mean,
        "delay_max": report.delay_max,
    } | _pushes(report.tally)


def _pushes(tally: Any) -> dict[str, int]:
    return {
        f"{outcome}_pushes": tally.get(outcome, 0)
        for outcome in (PushOutcome.APPLIED, PushOutcome.DUPLICATE, PushOutcome.LATE)
    }
