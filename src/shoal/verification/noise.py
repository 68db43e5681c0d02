"""Results over seeds: how much they scatter, and whether one way to train ends worse than another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from shoal.verification.report import Verdict

POINT = 0.01
"""A share (accuracy and the like) may be worse by this."""
LOSS_PART = 0.02
"""A loss may be worse by this part of the reference's."""
NUM_ERRORS = 2.0
"""A difference within so many of its standard errors is noise."""
MOST_NOISE = 3.0
"""Noise excuses a difference up to so many times what is accepted without: more is worse, however unsure."""
_FALLING = ("loss", "error")
"""A number so named should fall; all others should rise, as `Plateau` has it."""

RULE = (
    "Judged is the mean over seeds: it may be worse by 1 point, or by the noise (two standard errors of the "
    "differences seed by seed) up to 3 points. Where there is no metric between 0 and 1, the loss is judged, with "
    "2% and 6%."
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One number over seeds."""

    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of these values; one alone has none."""
        return cls(mean=mean(values), deviation=_deviation(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class SeedContest:
    """One number of two ways to train, over the same seeds."""

    what: str
    ours: Spread
    reference: Spread
    worse_by: float
    """The mean difference; negative where ours is better."""
    noise: float
    """Two standard errors of that mean, from the differences seed by seed."""
    bound: float | None
    """How much worse ours may be, noise aside; None where this number is not judged."""
    is_share: bool
    """Whether differences are told in points, or as parts of the reference."""

    @property
    def verdict(self) -> Verdict:
        """What it means."""
        if self.bound is None:
            return Verdict.NOT_JUDGED
        accepted = max(self.bound, min(self.noise, MOST_NOISE * self.bound))
        return Verdict.EQUAL if self.worse_by <= accepted else Verdict.MISMATCH

    @property
    def is_noise(self) -> bool:
        """Whether it is worse than is accepted, and only noise excuses it."""
        return self.verdict is Verdict.EQUAL and self.bound is not None and self.worse_by > self.bound

    @property
    def words(self) -> str:
        """The verdict in words: `within 1 point`, `worse by 2.3 points`."""
        gap = self.difference(abs(self.worse_by))
        if self.bound is None:
            return f"{'worse' if self.worse_by > 0 else 'better'} by {gap}" if self.worse_by else "the same"
        if abs(self.worse_by) <= self.bound:
            return f"within {self.difference(self.bound)}"
        if self.worse_by < 0:
            return f"better by {gap}"
        return f"worse by {gap}" + ", within noise" * self.is_noise

    def difference(self, value: float) -> str:
        """A difference in points, or per cent of the reference."""
        if self.is_share:
            points = _short(100 * value)
            return f"{points} point{'' if points == '1' else 's'}"
        return f"{_short(100 * value / abs(self.reference.mean))}%" if self.reference.mean else _short(value)


def contests(ours: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]) -> list[SeedContest]:
    """A contest for each number that all runs have; `ours[i]` and `reference[i]` share a seed."""
    if not ours:
        return []
    names = [name for name in ours[0] if all(name in results for results in (*ours, *reference))]
    pairs = {name: ([run[name] for run in ours], [run[name] for run in reference]) for name in names}
    shares = [name for name in names if _rises(name) and all(0 <= v <= 1 for side in pairs[name] for v in side)]
    judged = shares or [name for name in names if not _rises(name)]
    return [_contest(name, *pairs[name], is_share=name in shares, is_judged=name in judged) for name in names]


def _contest(
    name: str, ours: Sequence[float], reference: Sequence[float], *, is_share: bool, is_judged: bool
) -> SeedContest:
    sign = -1.0 if _rises(name) else 1.0
    gaps = [sign * (one - other) for one, other in zip(ours, reference, strict=True)]
    bound = POINT if is_share else LOSS_PART * abs(mean(reference))
    return SeedContest(
        what=name,
        ours=Spread.of(ours),
        reference=Spread.of(reference),
        worse_by=mean(gaps),
        noise=NUM_ERRORS * _deviation(gaps) / math.sqrt(len(gaps)),
        bound=bound if is_judged else None,
        is_share=is_share,
    )


def _rises(name: str) -> bool:
    return not any(word in name for word in _FALLING)


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _short(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"
