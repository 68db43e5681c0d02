"""K-fold splits: which samples each fold tests on, as a function of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from shoal.datasets.shipped import Shipped
from shoal.datasets.stream import ForwardOnly
from shoal.errors import SpecError
from shoal.spec import Fold, Stratified, Task, Weighted
from shoal.spec.checks import require_count

if TYPE_CHECKING:
    import numpy as np
    from torch.utils.data import Subset


def split_folds(length: int, folds: int, *, seed: int = 0, stratify: Any = None) -> list[np.ndarray]:
    """The samples that each fold tests on, in rising order; every sample is in one fold.

    Folds differ by one sample at most; with `stratify`, one label for each sample, so do their numbers of each
    class.
    """
    import numpy as np

    require_count("KFold", "folds", folds, least=2)
    if folds > length:
        raise SpecError(f"KFold: folds={folds} for {length} samples would leave some empty; use fewer folds.")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(length)
    if stratify is not None:
        labels = np.asarray(stratify)
        if labels.shape != (length,):
            raise SpecError(
                f"KFold: stratify needs one label for each of the {length} samples, found shape {labels.shape}."
            )
        order = order[np.argsort(labels[order], kind="stable")]
    return [np.sort(order[number::folds]) for number in range(folds)]


class KFold:
    """The data set as `folds` pairs (train, test): each sample is tested on in one, trained on in the others.

    The pairs are views; nothing is copied. They depend on the arguments alone, so that every process can make any
    of them by itself.
    """

    def __init__(self, dataset: Any, folds: int = 5, seed: int = 0, stratify: Sequence[Any] | None = None) -> None:
        if isinstance(dataset, ForwardOnly):
            raise SpecError(
                "KFold: the data is read forward only, as streams are; make a set of other shards for each fold."
            )
        self._dataset = dataset
        self._tests = split_folds(len(dataset), folds, seed=seed, stratify=stratify)

    def __len__(self) -> int:
        return len(self._tests)

    def __getitem__(self, number: int) -> tuple[Subset[Any], Subset[Any]]:
        """The pair of a fold, counted from 0."""
        from torch.utils.data import Subset

        test = self._tests[number]
        train = _all_but(test, len(self._dataset))
        return Subset(self._dataset, train.tolist()), Subset(self._dataset, test.tolist())


def with_fold(task: Task, fold: Fold) -> Task:
    """The task that trains on all but one fold of its train set, and tests on that one.

    The split has a seed of its own: whatever the task's, the folds of several runs fit together. Where the task
    samples by class, the folds are stratified by the same labels.
    """
    sampler = task.sampler
    if sampler is not None and not isinstance(sampler, (Weighted, Stratified)):
        raise SpecError(
            "fold: a sampler of your own numbers the samples of the whole train set, so it cannot be used on a "
            "fold; leave one of them out."
        )
    stratify = sampler.labels if isinstance(sampler, Stratified) else None

    @cache
    def pair() -> tuple[Any, Any]:
        return KFold(task.dataset("train"), fold.folds, stratify=stratify)[fold.number - 1]

    if sampler is not None:
        left_out = split_folds(len(sampler), fold.folds, stratify=stratify)[fold.number - 1]
        sampler = sampler.among(_all_but(left_out, len(sampler)))
    train, test = (lambda: pair()[0]), (lambda: pair()[1])
    if isinstance(task.train, Shipped):
        return replace(task, train=Shipped(train), test=Shipped(test), sampler=sampler)
    return replace(task, train=train, test=test, sampler=sampler)


def _all_but(samples: np.ndarray, length: int) -> np.ndarray:
    import numpy as np

    return np.setdiff1d(np.arange(length), samples, assume_unique=True)
