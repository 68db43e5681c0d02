"""What Shoal promises beside its peers, as data, and whether a comparison kept it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.compare import SpeedRow


@dataclass(frozen=True)
class Bar:
    """On `model`, `subject` is at least `floor` times as fast as `peer`."""

    model: str
    subject: str
    peer: str
    floor: float | None = None
    """None: the ratio is shown, and nothing is promised."""


BARS = (
    Bar("mlp", "data", "single", 1.9),
    Bar("mlp", "data", "data_without_journal", 0.95),
    Bar("mlp", "data", "ddp", 1.6),
    Bar("mlp", "data", "ddp_tuned", 1.4),
    Bar("gpt", "data", "ddp", 1.15),
    Bar("gpt", "data", "ddp_tuned", 1.05),
    Bar("conv", "data", "ddp", 1.3),
    Bar("conv", "data", "ddp_tuned", 1.05),
    Bar("digits", "data", "ddp", 2.0),
    Bar("mlp", "ps_asp", "tensorflow_ps", 2.0),
    Bar("mlp", "ps_asp", "ddp", 1.4),
    Bar("mlp", "ps_asp", "tensorflow_ps_tuned"),
    Bar("mlp", "ps_asp_2", "tensorflow_ps", 1.7),
    Bar("mlp", "ps_asp_2", "tensorflow_ps_2", 1.7),
    Bar("mlp", "ps_asp_2", "tensorflow_ps_tuned"),
)
"""For two processes (and the servers, where there are any) on two cores. What is promised beside TensorFlow holds
for the way that it documents; the ratio to one tuned by hand is shown with it."""

TRAINER_BARS = (Bar("mlp", "trainer", "loop", 0.97), Bar("gpt", "trainer", "loop", 0.97))
"""For `shoal.Trainer` in one process, beside a loop written by hand."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Something that should be small: at most `most` of `unit`, beside a peer."""

    model: str
    subject: str
    peer: str
    most: float | None = None
    """None: the value is shown, and nothing is promised."""
    unit: str


@dataclass(frozen=True, kw_only=True)
class BarVerdict:
    """A bar and what was measured against it."""

    bar: Bar
    ratios: tuple[float, ...]
    """One per round."""

    @property
    def ratio(self) -> float:
        """The median over rounds, which is what counts."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        """Whether the promise was kept."""
        return self.bar.floor is None or self.ratio >= self.bar.floor


@dataclass(frozen=True, kw_only=True)
class BarFinding:
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
        return self.ceiling.most is None or self.value <= self.ceiling.most


@dataclass(frozen=True, kw_only=True)
class BarClaim:
    """Something that is so or is not, as that nothing was lost."""

    model: str
    subject: str
    met: bool


def judge(rows: Iterable[SpeedRow], bars: Iterable[Bar] = BARS) -> list[BarVerdict]:
    """A verdict for each bar whose subject and peer were measured side by side."""
    measured = {(row.model, row.variant): row for row in rows}
    return [
        BarVerdict(bar=bar, ratios=tuple(subject.ratios_to(peer)))
        for bar in bars
        if (subject := measured.get((bar.model, bar.subject))) and (peer := measured.get((bar.model, bar.peer)))
    ]
