"""What a verification over seeds found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.verification.noise import RULE, SeedContest
from shoal.verification.report import Verdict


@dataclass(frozen=True, kw_only=True)
class Pushes:
    """What became of the updates, over all shards of a run."""

    delay_mean: float = 0.0
    """By how many updates the model had moved on when a gradient arrived."""
    delay_max: int = 0
    applied: int = 0
    duplicate: int = 0
    late: int = 0
    """Too late for a quorum, and dropped."""
    clean: bool = True
    """Whether every part of the data was applied once, or dropped by a quorum."""


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One run, of one seed."""

    seed: int
    steps: int = 0
    samples: int = 0
    results: Mapping[str, float] = field(default_factory=dict)
    """Of the trained model; empty where the run did not finish."""
    rollbacks: int = 0
    """How often the coordinator went back to an earlier state because the loss ran away."""
    diverged: str = ""
    """How the loss ran away, in a sentence; empty where it did not."""
    failed: str = ""
    """Why the run ended before its time, in a sentence; empty where it did not."""
    pushes: Pushes | None = None
    """None where there are no servers."""

    @property
    def trouble(self) -> str:
        """What went wrong; empty where all went well."""
        return self.failed or self.diverged


@dataclass(frozen=True, kw_only=True)
class ResultReport:
    """A strategy beside synchronous training on the same samples, over the same seeds."""

    target: str
    strategy: str
    reference: str
    workers: int
    ours: tuple[SeedRun, ...]
    references: tuple[SeedRun, ...]
    contests: tuple[SeedContest, ...]
    precision: str = "fp32"
    """What the model computed in, in all runs."""

    @property
    def lost_runs(self) -> tuple[SeedRun, ...]:
        """Runs of the strategy that diverged or failed."""
        return tuple(run for run in self.ours if run.trouble)

    @property
    def lost_references(self) -> tuple[SeedRun, ...]:
        """Synchronous runs that diverged or failed: then the task is at fault."""
        return tuple(run for run in self.references if run.trouble)

    @property
    def miscounted(self) -> tuple[SeedRun, ...]:
        """Runs in which some update was lost, or applied twice."""
        return tuple(run for run in self.ours if run.pushes is not None and not run.pushes.clean)

    @property
    def worse(self) -> tuple[SeedContest, ...]:
        """The numbers that came out worse than is accepted."""
        return tuple(contest for contest in self.contests if contest.verdict is Verdict.MISMATCH)

    @property
    def ok(self) -> bool:
        """Whether the strategy trains as well as synchronous training does."""
        return not (self.lost_runs or self.lost_references or self.miscounted or self.worse)

    def to_dict(self) -> dict[str, Any]:
        """This report as plain data, for JSON."""
        values = asdict(self) | {"ok": self.ok, "rule": RULE}
        values["contests"] = [
            {**asdict(contest), "verdict": contest.verdict.value, "words": contest.words}
            for contest in self.contests
        ]
        return values
