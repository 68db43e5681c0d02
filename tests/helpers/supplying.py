"""Data for a strategy that is tried without a loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.step.work import Work


@dataclass(frozen=True)
class OneBatch:
    """There is one batch, for whoever wants to see the model run."""

    batch: Any

    def sample(self) -> Any:
        return self.batch

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False) -> Work:
        raise AssertionError("the test brings what a step trains on")
