"""Which samples are trained on and in which order, as the user says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import SpecError
from shoal.spec.checks import require_count

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples are drawn by their weights: one of weight 2 comes twice as often as one of weight 1."""

    weights: Any
    """One number for each sample, zero or more."""
    replacement: bool = True
    """Whether an epoch may take a sample several times."""
    num_samples: int | None = None
    """Samples of an epoch; default as many as there are weights (without replacement: weights above 0)."""

    def __post_init__(self) -> None:
        import numpy as np

        weights = np.asarray(self.weights, dtype=np.float64)
        object.__setattr__(self, "weights", weights)
        if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
            raise SpecError(
                "Weighted: weights must be one number of at least 0 for each sample, and not all 0; found "
                f"shape {weights.shape} and values that are negative, no numbers, or nothing but 0."
            )
        if self.num_samples is not None:
            require_count("Weighted", "num_samples", self.num_samples)
        drawable = int((weights > 0).sum())
        if not self.replacement and (self.num_samples or 0) > drawable:
            raise SpecError(
                f"Weighted: num_samples={self.num_samples} without replacement, but only {drawable} samples have "
                "a weight above 0; draw fewer, or with replacement=True."
            )

    def __len__(self) -> int:
        return len(self.weights)

    def among(self, samples: np.ndarray) -> Weighted:
        """The same for a part of the data set; the part decides how many an epoch draws."""
        return replace(self, weights=self.weights[samples], num_samples=None)


@dataclass(frozen=True, eq=False)
class Stratified:
    """Every batch has the classes in the proportions of the whole set, as near as whole samples allow."""

    labels: Any
    """One class for each sample: a whole number or a text."""

    def __post_init__(self) -> None:
        import numpy as np

        labels = np.asarray(self.labels)
        object.__setattr__(self, "labels", labels)
        if labels.ndim != 1 or labels.dtype.kind not in "iubUS":
            raise SpecError(
                "Stratified: labels must be one whole number or text for each sample, found "
                f"shape {labels.shape} of type {labels.dtype}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def among(self, samples: np.ndarray) -> Stratified:
        """The same for a part of the data set."""
        return replace(self, labels=self.labels[samples])


class Ordering(Protocol):
    """A sampler of the user's own that keeps its seed itself."""

    def order(self, epoch: int) -> Sequence[int]:
        """The samples of an epoch; the same for the same epoch, in every process."""
        ...


Sampler = Weighted | Stratified | Ordering | Callable[[int, int], Sequence[int]]
"""What `Task.sampler` takes; a function gets (epoch, seed)."""


def check_sampler(sampler: Any) -> None:
    """Whether this can say which samples an epoch takes."""
    if not (isinstance(sampler, (Weighted, Stratified)) or callable(sampler) or hasattr(sampler, "order")):
        raise SpecError(
            "Task: sampler must be shoal.Weighted(...), shoal.Stratified(...), a function (epoch, seed) -> "
            f"indices, or an object with order(epoch), found {type(sampler).__name__}."
        )


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One of several equal parts of the train set, which is tested on while the others are trained on."""

    number: int
    """Which one, from 1."""
    folds: int
    """How many there are."""

    @classmethod
    def parse(cls, text: Any) -> Fold:
        """Read the written form, `2/5`: the second of five."""
        written = re.fullmatch(r"(\d+)/(\d+)", str(text))
        if not written or not 1 <= int(written[1]) <= int(written[2]) or int(written[2]) < 2:
            raise SpecError(f"fold must be written like 2/5, the second of five, found {text!r}.")
        return cls(number=int(written[1]), folds=int(written[2]))
