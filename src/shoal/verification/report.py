"""What a verification found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What a comparison means for the whole."""

    EQUAL = "equal"
    """Within its bound."""
    MISMATCH = "mismatch"
    """Beyond its bound: the strategy does not compute what one process computes."""
    WARNING = "warning"
    """Worth a look, but one process does the same."""
    NOT_JUDGED = "not judged"
    """Printed for information: no bound can be given."""


BITWISE = 0.0
"""The bound of a comparison in which every bit must be the same."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison of one kind of values."""

    comparison: str
    """What was compared with what."""
    what: str
    """Parameters, buffers, optimizer state."""
    measured: float | None = None
    """The largest difference, relative to the largest value of its tensor; None where nothing is measured."""
    bound: float | None = None
    """The most that is accepted; `BITWISE` for equal bits, None where nothing is judged."""
    verdict: Verdict
    worst: str = ""
    """The tensor with the largest difference; empty where there is none."""
    note: str = ""
    """What else there is to say: the parameters concerned, or why nothing is judged."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All comparisons of one verification."""

    target: str
    strategy: str
    workers: int
    slots: int
    steps: int
    rows: tuple[Row, ...]
    precision: str = "fp32"
    """What the model computed in, but for the comparison in float64."""
    replayed: str = ""
    """The run that was repeated; empty where a strategy was compared with one process."""

    @property
    def mismatches(self) -> tuple[Row, ...]:
        """The comparisons that failed."""
        return tuple(row for row in self.rows if row.verdict is Verdict.MISMATCH)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that one process would do otherwise."""
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """This report as plain data, for JSON. An infinite difference is written as text."""
        values = asdict(self) | {"ok": self.ok}
        values["rows"] = [
            {**asdict(row), "verdict": row.verdict.value, "measured": _plain(row.measured)} for row in self.rows
        ]
        return values


def _plain(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "infinite" if value == float("inf") else value


def numbers_of(precision: str) -> str:
    """The word for a job's precision."""
    return {"fp32": "float32", "adaptive": "adaptive precision"}.get(precision, precision)


def in_half(precision: str) -> str:
    """` in bf16`, to be put behind a noun; nothing in float32, which goes without saying."""
    return "" if precision == "fp32" else f" in {numbers_of(precision)}"
