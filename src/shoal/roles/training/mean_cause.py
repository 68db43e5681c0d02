"""Why a loss is no mean over samples, found by trying what it could be a mean over, and what to set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from shoal.metrics import IGNORED_TARGET

Count = Callable[[Any], float]
"""What a batch counts."""


@dataclass(frozen=True, kw_only=True)
class LossLook:
    """A batch whose loss is not that of its halves."""

    batch: Any
    halves: tuple[Any, Any]
    whole: float
    """Its loss."""
    losses: tuple[float, float]
    """Those of its halves."""
    twice: float
    """That of all its samples twice over."""
    tolerance: float
    """What rounding may come to."""
    is_weighted: bool
    """Whether the task says what a batch counts."""

    def cause(self) -> str:
        """Why it differs, and what to do, as half a sentence."""
        if self._is_whole(sum(self.losses)):
            return "it is a sum over samples: let it be their mean, for instance with reduction='mean'"
        if self.is_weighted and self._is_whole(sum(self.losses) / 2) and self._halves_are_even:
            return "it is a mean over samples after all: leave weight= out"
        for text, count in counts_of(self.batch):
            if self._is_whole(self._mean_by(count)):
                return f"it is a mean over something else: set weight=lambda batch: {text}"
        if self._is_whole(self.twice):
            return (
                "some samples count more than others in it (class weights, tokens): say with weight= what a batch "
                "counts, for instance weight=lambda batch: float(class_weights[batch[1]].sum())"
            )
        return (
            "what a sample adds to it depends on the others in its batch (negatives, ranks, statistics), so no "
            "weight= can mend it: only one part per batch (one worker, accumulate=1) trains as meant"
        )

    def _is_whole(self, value: float) -> bool:
        return math.isfinite(value) and abs(value - self.whole) <= self.tolerance

    @property
    def _halves_are_even(self) -> bool:
        first, second = (_length(half) for half in self.halves)
        return first == second

    def _mean_by(self, count: Count) -> float:
        """What the halves come to if a batch counts so much."""
        weights = [count(half) for half in self.halves]
        # What counts nothing has no mean either.
        sums = [loss * weight for loss, weight in zip(self.losses, weights, strict=True) if weight]
        return sum(sums) / sum(weights) if sum(weights) else math.nan


def counts_of(batch: Any, path: str = "batch") -> Iterator[tuple[str, Count]]:
    """What a batch of this form may count, as Python and as a function: tokens, masks, labels."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _inside(counts_of(value, f"{path}[{key!r}]"), itemgetter(key))
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _inside(counts_of(value, f"{path}[{index}]"), itemgetter(index))
    elif isinstance(batch, torch.Tensor) and batch.dim() and not batch.is_floating_point():
        ignored = IGNORED_TARGET
        yield f"float(({path} != {ignored}).sum())", lambda tensor: float((tensor != ignored).sum())
        if batch.dim() > 1:
            # Models of language leave the first token out: it follows from nothing.
            yield (
                f"float(({path}[:, 1:] != {ignored}).sum())",
                lambda tensor: float((tensor[:, 1:] != ignored).sum()),
            )
            yield f"float(({path} != 0).sum())", lambda tensor: float((tensor != 0).sum())


def _inside(found: Iterator[tuple[str, Count]], take: Callable[[Any], Any]) -> Iterator[tuple[str, Count]]:
    for text, count in found:
        yield text, partial(_counted, count, take)


def _counted(count: Count, take: Callable[[Any], Any], whole: Any) -> float:
    return count(take(whole))


def _length(batch: Any) -> int:
    while isinstance(batch, Mapping | tuple | list):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)
