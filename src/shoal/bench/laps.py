"""What one run has shown, and what several runs of one strategy say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import LaunchError

LEAST_STEPS = 5
COOL_DOWN_STEPS = 5
"""While so many steps are left nobody has run out of work, though some may be steps ahead of others."""

Timeline = Sequence[tuple[float, int]]
"""A time in seconds, and the samples of all workers that were committed by then."""


@dataclass(frozen=True)
class Course:
    """How many steps every run takes: the same for all, so that all train on the same samples."""

    steps: int
    """Those that count."""

    @property
    def warm_up(self) -> int:
        """Steps before those that count."""
        return max(3, self.steps // 10)

    @property
    def total_steps(self) -> int:
        """With those before and behind."""
        return self.warm_up + self.steps + COOL_DOWN_STEPS

    def window(self, samples: int) -> range:
        """Of so many samples of a whole run, those in the steps that count."""
        first, last = self.warm_up, self.warm_up + self.steps
        return range(samples * first // self.total_steps, samples * last // self.total_steps)


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One run of one strategy."""

    samples_per_s: float
    first_step_s: float
    """From its start until a step was committed. Its processes are forked from one that has imported torch."""
    peak_memory: Mapping[int, int]
    """By worker: the most bytes that it held, those included that it shares with others."""
    loss: float
    """At its end; all runs have trained on the same number of samples then."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """All runs of one strategy, one for each round."""

    strategy: str
    laps: tuple[Lap, ...]

    @property
    def samples_per_s(self) -> float:
        """The median over rounds."""
        return statistics.median(lap.samples_per_s for lap in self.laps)

    @property
    def spread(self) -> float | None:
        """How much rounds differ: slowest to fastest, over the median; None where there is but one."""
        if len(self.laps) < 2:
            return None
        speeds = [lap.samples_per_s for lap in self.laps]
        return (max(speeds) - min(speeds)) / self.samples_per_s

    @property
    def first_step_s(self) -> float:
        """The median over rounds."""
        return statistics.median(lap.first_step_s for lap in self.laps)

    @property
    def peak_memory(self) -> float:
        """Of the worker that held most, the median over rounds; 0 where none has said."""
        return statistics.median(max(lap.peak_memory.values(), default=0) for lap in self.laps)

    @property
    def loss(self) -> float:
        """The median over the rounds in which it was known."""
        known = [lap.loss for lap in self.laps if not math.isnan(lap.loss)]
        return statistics.median(known) if known else math.nan

    def ratio_to(self, other: BenchRow) -> float:
        """How many times the other's speed, round by round: both met the same noise of the machine."""
        # A comparison that was broken off has measured some once less than others.
        pairs = zip(self.laps, other.laps, strict=False)
        return statistics.median(ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs)


def speed(timeline: Timeline, window: range) -> float:
    """Samples per second from the first to the last commit in the window: in lockstep or not, in the same way."""
    inside = [(when, samples) for when, samples in timeline if window.start <= samples <= window.stop]
    if len(inside) < 2:
        raise LaunchError(f"bench: {len(inside)} commits are too few to measure a speed by; take more --steps.")
    (begin, first), (end, last) = inside[0], inside[-1]
    return (last - first) / max(end - begin, 1e-9)


def final_loss(losses: Sequence[float]) -> float:
    """The mean over the last tenth of the steps: of a single batch it would say little."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :]) if losses else math.nan


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Another first one in each round, so that none always runs on the machine the same one has warmed."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]
