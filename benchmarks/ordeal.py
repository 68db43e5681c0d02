"""What a run under faults has shown beside one without, and what is promised of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.bars import Bar, BarClaim, BarFinding, BarVerdict, Ceiling
from benchmarks.measurement import Timeline
from benchmarks.outages import Outage
from shoal.errors import LaunchError

CALM, OWN_TIMELINE = "no faults", "its own timeline"
CALM_PART = 3
"""The throughput without faults is that of a third of a run's length before it, and a third after it."""


@dataclass(frozen=True, kw_only=True)
class Ordeal:
    """A run under faults, and the same one without."""

    name: str
    calm_samples_per_s: float
    """Right before and right after it, so that what other users of the machine take hits both alike."""
    samples_per_s: float
    faults: Mapping[str, int]
    """How many of which kind came to pass."""
    outages: tuple[Outage, ...]
    seconds: float
    """From its first commit to its last."""
    all_hung_named: bool | None = None
    """Whether every process that was stopped was found and named; None where none was."""
    is_audit_clean: bool | None = None
    """Whether every sample was committed once; None where nobody counts."""
    is_count_exact: bool | None = None
    """Whether the model's own weights say the same as the audit; None where they do not count."""
    has_same_bits: bool | None = None
    """Whether the model is that of the run without faults; None where it need not be."""

    @property
    def kept(self) -> float:
        """The throughput that was left, as a part of that without faults; less what had to be lost."""
        return self.samples_per_s / self.calm_samples_per_s / (1 - self.due_s / self.seconds)

    @property
    def kept_by_timeline(self) -> float:
        """The same by the run alone: its time, but for what its faults cost beyond what they had to."""
        return 1 - (sum(outage.lost_s for outage in self.outages) - self.due_s) / self.seconds

    @property
    def due_s(self) -> float:
        """What nobody could have saved."""
        return sum(outage.due_s for outage in self.outages)

    @property
    def lost_s(self) -> float:
        """The time lost per fault."""
        return statistics.fmean(outage.lost_s for outage in self.outages) if self.outages else 0.0

    @property
    def to_next_step_s(self) -> float:
        """From a fault to the next committed step, the median."""
        return statistics.median(outage.to_next_step_s for outage in self.outages) if self.outages else 0.0

    @property
    def longest_to_next_step_s(self) -> float:
        """The same, of the worst fault."""
        return max((outage.to_next_step_s for outage in self.outages), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a scenario must keep; None: it is measured and not judged."""

    kept: float | None = None
    """Beside runs without faults."""
    kept_by_timeline: float | None = None
    lost_s: float | None = None
    to_next_step_s: float | None = None


def judge_ordeal(model: str, ordeal: Ordeal, promise: Promise) -> list[BarVerdict | BarFinding | BarClaim]:
    """Whether a scenario kept its promise, and that nothing was lost or changed."""
    judged: list[BarVerdict | BarFinding | BarClaim] = []
    if promise.kept is not None:
        judged.append(BarVerdict(bar=Bar(model, ordeal.name, CALM, promise.kept), ratios=(ordeal.kept,)))
    if promise.kept_by_timeline is not None:
        bar = Bar(model, ordeal.name, OWN_TIMELINE, promise.kept_by_timeline)
        judged.append(BarVerdict(bar=bar, ratios=(ordeal.kept_by_timeline,)))
    for most, what, value in (
        (promise.lost_s, "lost per fault", ordeal.lost_s),
        (promise.to_next_step_s, "fault to next step, median", ordeal.to_next_step_s),
    ):
        if most is not None:
            ceiling = Ceiling(model=model, subject=f"{ordeal.name}: {what}", peer="", most=most, unit="s")
            judged.append(BarFinding(ceiling=ceiling, values=(value,)))
    for what, held in (
        ("finishes", bool(ordeal.faults)),  # Without faults it would show nothing.
        ("audit clean", ordeal.is_audit_clean),
        ("the weights count as the audit does", ordeal.is_count_exact),
        ("bits as without faults", ordeal.has_same_bits),
        ("every hung rank named", ordeal.all_hung_named),
    ):
        if held is not None:
            judged.append(BarClaim(model=model, subject=f"{ordeal.name}: {what}", met=held))
    return judged


def throughput(*timelines: Timeline, until: float | None = None) -> float:
    """Samples per second from the first commit to the last, or to the end of the time that was given; of several
    runs, all samples over all seconds."""
    samples = seconds = 0.0
    for timeline in timelines:
        if len(timeline) < 2:
            raise LaunchError(f"bench: a run left {len(timeline)} marks, too few to measure; let it run longer.")
        (begin, first), (end, last) = timeline[0], timeline[-1]
        samples += last - first
        seconds += (end if until is None else until) - begin
    return samples / seconds
