"""What Shoal promises beside its peers, as data, and whether a comparison kept it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.bench.compare import Row


@dataclass(frozen=True)
class Bar:
    """On `model`, at least `floor` times the samples per second of `peer`."""

    model: str
    peer: str
    floor: float


BARS = (
    Bar("mlp", "single", 1.9),
    Bar("mlp", "data_without_journal", 0.95),
    Bar("mlp", "ddp", 1.6),
    Bar("mlp", "ddp_tuned", 1.4),
    Bar("gpt", "ddp", 1.15),
    Bar("gpt", "ddp_tuned", 1.05),
    Bar("conv", "ddp", 1.3),
    Bar("conv", "ddp_tuned", 1.05),
    Bar("digits", "ddp", 2.0),
)
"""For two processes on two cores."""

TRAINER_BARS = (Bar("mlp", "loop", 0.97), Bar("gpt", "loop", 0.97))
"""For `shoal.Trainer` in one process, beside a loop written by hand."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Something that should be small: at most `most` of `unit`, beside a peer."""

    model: str
    subject: str
    peer: str
    most: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bar and what was measured against it."""

    bar: Bar
    subject: str
    ratios: tuple[float, ...]
    """One per round."""

    @property
    def ratio(self) -> float:
        """The median over rounds, which is what counts."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        """Whether the promise was kept."""
        return self.ratio >= self.bar.floor


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A ceiling and what was measured under it."""

    ceiling: Ceiling
    values: tuple[float, ...]
    """One per round."""

    @property
    def value(self) -> float:
        """The median over rounds, which is what counts."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the promise was kept."""
        return self.value <= self.ceiling.most


def judge(rows: Iterable[Row], subject: str = "data", bars: Iterable[Bar] = BARS) -> list[Verdict]:
    """A verdict for each bar whose model and peer were measured beside the subject."""
    measured = {(row.model, row.variant): row for row in rows}
    return [
        Verdict(
            bar=bar,
            subject=subject,
            ratios=tuple(measured[bar.model, subject].ratios_to(measured[bar.model, bar.peer])),
        )
        for bar in bars
        if (bar.model, subject) in measured and (bar.model, bar.peer) in measured
    ]
