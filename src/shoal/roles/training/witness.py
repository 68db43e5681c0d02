"""Which part of a step failed, and which sample of it: what a process can say before it ends."""

from __future__ import annotations

import traceback

import numpy as np
import torch

from shoal.errors import InjectedFault, ShoalError
from shoal.feed.feed import Feed
from shoal.model.replica import Replica
from shoal.observe.happenings import Raised
from shoal.step.compute import task_loss

MOST_SAMPLES = 4096
"""Larger parts are not searched: others wait for this process's end."""
MOST_TRIED = 16
"""So many are tried by themselves, to see whether it is a sample that is wrong or what all have in common."""


class Witness:
    """Traces a process's failure to the part of a step that it computed, and to a sample of it."""

    def __init__(self, replica: Replica, feed: Feed) -> None:
        self._replica = replica
        self._feed = feed
        self.step = 0
        """The step that this process is at."""

    def testify(self, error: Exception) -> Raised:
        """What to tell about an error; the sample is None where no single one is to blame."""
        part, kind = self._feed.in_use, type(error)
        sample = None if part is None else self._find_sample(part.samples, kind)
        tried = () if part is None or sample is None else _spread(part.samples, sample)
        return Raised(
            step=self.step,
            slot=None if part is None else part.slot,
            sample=sample,
            tried=len(tried) or None,
            raising=sum(self._fails(np.array([one]), kind) for one in tried) or None,
            error=traceback.format_exception_only(error)[-1].strip(),
            # What Shoal itself refuses, it refuses everywhere.
            final=isinstance(error, ShoalError) and not isinstance(error, InjectedFault),
        )

    def _find_sample(self, samples: np.ndarray, kind: type[Exception]) -> int | None:
        """Halve what fails until one sample is left. This process computes nothing else any more."""
        self._replica.module.eval()  # BatchNorm takes no single samples while it trains
        if not 0 < len(samples) <= MOST_SAMPLES or not self._fails(samples, kind):
            return None
        while len(samples) > 1:
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            guilty = [half for half in halves if self._fails(half, kind)]
            if not guilty:
                return None
            samples = guilty[0]
        return int(samples[0])

    @torch.no_grad()
    def _fails(self, samples: np.ndarray, kind: type[Exception]) -> bool:
        try:
            task_loss(self._replica, self._feed.batch(samples))
        except Exception as error:
            return type(error) is kind  # part of a model may not compute a loss, which says nothing of samples
        return False


def _spread(samples: np.ndarray, found: int) -> tuple[int, ...]:
    """Some of these samples, from their first to their last, with the one that was found."""
    chosen = np.linspace(0, len(samples) - 1, min(MOST_TRIED, len(samples))).round().astype(int)
    return tuple(dict.fromkeys([found, *samples[chosen].tolist()]))
