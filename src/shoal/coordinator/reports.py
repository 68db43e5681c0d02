"""What members last said about themselves, as far as the coordinator uses it; at the end, the audit of it.

| from    | fact              | meaning                                                                         |
|---------|-------------------|---------------------------------------------------------------------------------|
| workers | `loss`            | mean loss of the last step                                                      |
|         | `samples_per_s`   | speed                                                                           |
|         | `waiting`         | part of the time, 0 to 1, in which consistency made it wait                     |
|         | `done`            | it has trained on all that is its own (where cells are not leased)              |
|         | `post`            | where its peers find it; all workers are told all posts, once each has posted   |
|         | `hold`, `held`,   | the first worker wants all at one border, a worker is at its clock, the first   |
|         | `released`        | worker is done with it: see `holding.py`                                        |
| servers | `shards`          | for each shard by number: `cells` (a `CellSet` as plain data, or the first of   |
|         |                   | its runs), `num_cells` (all of them), `tally` (pushes by outcome),              |
|         |                   | `delay_mean`, `delay_max`, and more that is only shown                          |

A shard's `cells` are those that its backup has too: they count as done whoever dies next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shoal.coordinator.plan import JobPlan
from shoal.errors import ProtocolError
from shoal.ledger.cells import CellSet
from shoal.ps.consistency import Mode, parse_sync
from shoal.ps.messages import PushOutcome

SHOWN = 10
"""Missing cells that are listed by number."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """One shard's books, as its primary reports them."""

    cells: CellSet
    """Those it tells by number: all, or the lowest of them."""
    num_cells: int
    """How many there are in all."""
    tally: Mapping[str, int]
    delay_mean: float
    delay_max: int = 0


@dataclass
class Reports:
    """The newest facts of every member, and of every shard."""

    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    shards: dict[int, ShardReport] = field(default_factory=dict)

    def take(self, node: int, facts: dict[str, Any], primary_of: Iterable[int]) -> list[int]:
        """Keep a member's facts, and those of the shards that it is the primary of; returns these shards.

        `ProtocolError` if something is malformed.
        """
        told = facts.get("shards", {})
        if not isinstance(told, dict):
            raise ProtocolError("A report's shards must be a table by number.")
        shards = {shard: _shard_report(told[shard]) for shard in primary_of if shard in told}
        self.facts[node] = facts
        self.shards.update(shards)
        return list(shards)

    def forget(self, node: int) -> None:
        """A member is gone."""
        self.facts.pop(node, None)

    def number(self, node: int, name: str) -> float | None:
        """A number that a member reported; None where it did not. It may be infinite or no number at all."""
        value = self.facts.get(node, {}).get(name)
        return float(value) if isinstance(value, int | float) else None

    def post_of(self, node: int) -> dict[str, Any] | None:
        """What a worker wants the others to know; None where it has posted nothing."""
        post = self.facts.get(node, {}).get("post")
        return post if isinstance(post, dict) else None

    def everywhere(self, num_shards: int) -> CellSet:
        """The cells that every shard has; none while one has not reported."""
        if len(self.shards) < num_shards:
            return CellSet()
        return CellSet.in_at_least(num_shards, [report.cells for report in self.shards.values()])

    @property
    def end(self) -> int:
        """No shard has told of a cell from here on."""
        return max((report.cells.end for report in self.shards.values()), default=0)

    def least_cells(self, num_shards: int) -> int:
        """How many cells the shard has that has fewest; 0 while one has not reported."""
        counts = [report.num_cells for report in self.shards.values()]
        return min(counts) if len(counts) == num_shards else 0

    def mean_delay(self) -> float:
        """By how many updates gradients are late, over all shards."""
        delays = [report.delay_mean for report in self.shards.values()]
        return sum(delays) / len(delays) if delays else 0.0


def _shard_report(told: Any) -> ShardReport:
    if not isinstance(told, dict):
        raise ProtocolError("A report about a shard must be a table.")
    cells = CellSet.from_plain(told.get("cells"))
    tally, delay, delay_max = told.get("tally", {}), told.get("delay_mean", 0.0), told.get("delay_max", 0)
    if type(delay) not in (int, float) or not math.isfinite(delay) or type(delay_max) is not int:
        raise ProtocolError("A report about a shard has a mean and a largest delay.")
    num_cells = told.get("num_cells", len(cells))
    if type(num_cells) is not int or num_cells < len(cells):
        raise ProtocolError("A report about a shard has at least as many cells as it tells.")
    if not isinstance(tally, dict) or not all(type(count) is int for count in tally.values()):
        raise ProtocolError("A report about a shard has a tally of pushes by outcome.")
    return ShardReport(cells=cells, num_cells=num_cells, tally=tally, delay_mean=float(delay), delay_max=delay_max)


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
