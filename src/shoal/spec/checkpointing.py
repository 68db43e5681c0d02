"""How often a run saves its state, as the user writes it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from shoal.errors import SpecError
from shoal.spec.checks import require_count

DEFAULT_KEEP = 3
AUTO_BOUNDS_S = 10.0, 600.0
"""`auto` saves neither more nor less often, whatever was measured."""
ASSUMED_FAILURES_PER_S = 1 / 3600
"""For a run that has not failed yet."""
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_FORMS = "write every=200 (steps), every=30s, every=5m, auto or none, and ,keep=3 behind it"


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """When to save: `every=200`, `every=30s`, `every=5m`, `auto` or `none`; `,keep=3` says how many stay."""

    every_steps: int | None = None
    """Save after so many steps."""
    every_s: float | None = None
    """Save after so many seconds, at the end of a step."""
    auto: bool = False
    """Save as often as measured save time and failure rate make best."""
    keep: int = DEFAULT_KEEP
    """Checkpoints that stay; older ones are removed."""

    def __post_init__(self) -> None:
        if sum((self.every_steps is not None, self.every_s is not None, self.auto)) > 1:
            raise SpecError(f"Checkpoint rule: steps, seconds and auto exclude each other; {_FORMS}.")
        if self.every_steps is not None:
            require_count("Checkpoint rule", "every", self.every_steps)
        if self.every_s is not None and not 0 < self.every_s < math.inf:
            raise SpecError(f"Checkpoint rule: every must be longer than no time, found {self.every_s} s.")
        require_count("Checkpoint rule", "keep", self.keep)

    @property
    def is_off(self) -> bool:
        """Whether nothing is saved."""
        return self.every_steps is None and self.every_s is None and not self.auto

    @classmethod
    def parse(cls, text: str) -> CheckpointRule:
        """What the written form says."""
        when, *more = (item.strip() for item in text.split(","))
        keep = DEFAULT_KEEP
        for item in more:
            name, _, value = item.partition("=")
            if name != "keep" or not _is_count(value) or len(more) > 1:
                raise _unreadable(text)
            keep = int(value)
        if when in ("none", "auto"):
            return cls(auto=when == "auto", keep=keep)
        found = re.fullmatch(r"every=(\d+(?:\.\d+)?)(ms|s|m|h|)", when, re.ASCII)
        if found is None:
            raise _unreadable(text)
        number, unit = found.groups()
        if unit:
            return cls(every_s=float(number) * _UNITS_S[unit], keep=keep)
        if not _is_count(number):
            raise _unreadable(text)
        return cls(every_steps=int(number), keep=keep)

    def __str__(self) -> str:
        """The written form; `parse` reads it."""
        if self.is_off:
            return "none"
        if self.auto:
            when = "auto"
        else:
            when = f"every={self.every_steps}" if self.every_s is None else f"every={_seconds(self.every_s)}"
        return when if self.keep == DEFAULT_KEEP else f"{when},keep={self.keep}"

    def is_due(
        self, *, step: int, last_step: int, seconds_since: float, save_s: float, failures_per_s: float
    ) -> bool:
        """Whether to save after `step`; `last_step` was saved `seconds_since` ago, which took `save_s`."""
        if step <= last_step:
            return False
        if self.every_steps is not None:
            # Multiples, not distances: a resumed run saves at the steps where the unbroken one does.
            return step // self.every_steps > last_step // self.every_steps
        if self.every_s is not None:
            return seconds_since >= self.every_s
        return self.auto and seconds_since >= best_interval_s(save_s, failures_per_s)


def best_interval_s(save_s: float, failures_per_s: float) -> float:
    """Young's and Daly's interval: saving more often costs more time than failures lose, less often less."""
    rate = failures_per_s if failures_per_s > 0 else ASSUMED_FAILURES_PER_S
    least, most = AUTO_BOUNDS_S
    return min(max(math.sqrt(2 * max(save_s, 0.0) / rate), least), most)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _seconds(value: float) -> str:
    for unit in ("h", "m"):
        if value % _UNITS_S[unit] == 0:
            return f"{value / _UNITS_S[unit]:.0f}{unit}"
    return f"{Decimal(repr(value)).normalize():f}s"


def _unreadable(text: str) -> SpecError:
    return SpecError(f"Checkpoint rule {text!r} cannot be read; {_FORMS}.")
