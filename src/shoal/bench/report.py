"""What a comparison of strategies has shown, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.bench.laps import BenchRow, Course

ONE_PROCESS = "one process"
"""What the run of a single process is called among strategies."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Strategies beside one process, all on the same task and the same samples."""

    target: str
    workers: int
    threads: int
    """Of each worker."""
    threads_alone: int
    """Of the one process."""
    batch_size: int
    course: Course
    rounds: int
    """As many as were asked for."""
    alone: BenchRow | None
    """The one process; None where the comparison was broken off before it ran."""
    rows: tuple[BenchRow, ...]
    """Strategies that were measured, in the order in which they were named."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By strategy: why it could not train this task here."""
    is_broken_off: bool = False

    def ratio_to_one(self, row: BenchRow) -> float | None:
        """How many times as fast as one process."""
        return row.ratio_to(self.alone) if self.alone is not None else None

    def ratio_to_first(self, row: BenchRow) -> float | None:
        """How many times as fast as the first of the strategies."""
        return row.ratio_to(self.rows[0]) if self.rows else None

    @property
    def all_rows(self) -> tuple[BenchRow, ...]:
        """The one process, then the strategies."""
        return self.rows if self.alone is None else (self.alone, *self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for programs."""
        return {
            "target": self.target,
            "workers": self.workers,
            "threads": self.threads,
            "threads_alone": self.threads_alone,
            "batch_size": self.batch_size,
            "steps": self.course.steps,
            "warm_up_steps": self.course.warm_up,
            "total_steps": self.course.total_steps,
            "rounds": self.rounds,
            "broken_off": self.is_broken_off,
            "rows": [self._row(row) for row in self.all_rows],
            "left_out": dict(self.left_out),
        }

    def _row(self, row: BenchRow) -> dict[str, Any]:
        return {
            "strategy": row.strategy,
            "samples_per_s": row.samples_per_s,
            "spread": row.spread,
            "ratio_to_one": self.ratio_to_one(row),
            "ratio_to_first": self.ratio_to_first(row),
            "first_step_s": row.first_step_s,
            "peak_memory": row.peak_memory,
            "loss": row.loss,
            "rounds": [asdict(lap) for lap in row.laps],
        }
