"""Which samples a model has seen, from a few numbers about each run that trained it.

An order is computed by index, so its first positions can be computed again at any later time, also when the data
has grown since: a run is remembered as a `DataPass`, not as a list of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shoal.errors import CheckpointError, SpecError
from shoal.ledger.order import Order


@dataclass(frozen=True, kw_only=True)
class DataPass:
    """One run's way over the data, as far as it came."""

    length: int
    """Samples that there were."""
    samples: int
    """Samples that it trained on, counted anew in every epoch."""
    seed: int
    shuffle: bool
    skips_seen: bool = False
    """Whether it left out what the passes before it had seen."""
    is_plain: bool = True
    """Whether every epoch took each sample once. Of other orders nobody knows later what they took."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataPass:
        """What `to_dict` wrote."""
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"The checkpoint does not tell which samples it has seen ({error}).") from None


def seen_by(passes: Sequence[DataPass]) -> np.ndarray:
    """By sample, of those there were in the last pass: whether any pass has trained on it."""
    seen = np.zeros(0, dtype=bool)
    for each in passes:
        if not each.is_plain:
            raise SpecError(
                "--skip-seen computes again what was seen from the order of samples, but the checkpoint was "
                "trained with a sampler, a fold or a stream; leave --skip-seen out."
            )
        if each.length < len(seen):
            raise SpecError(
                f"--skip-seen needs data that new samples were appended to, but there were {len(seen)} samples "
                f"before and {each.length} later; leave --skip-seen out."
            )
        seen = np.concatenate([seen, np.zeros(each.length - len(seen), dtype=bool)])
        choice = np.flatnonzero(~seen) if each.skips_seen else np.arange(each.length)
        if each.samples >= len(choice):
            seen[choice] = True
        else:
            order = Order(len(choice), each.seed, shuffle=each.shuffle)
            seen[choice[order.samples(0, 0, each.samples)]] = True
    return seen


def unseen(passes: Sequence[DataPass], length: int) -> np.ndarray:
    """The samples, of so many that there are now, that no pass has trained on."""
    seen = seen_by(passes)
    if length < len(seen):
        raise SpecError(
            f"--skip-seen needs data that new samples were appended to, but the checkpoint was trained on "
            f"{len(seen)} samples and now there are {length}; leave --skip-seen out."
        )
    left = np.concatenate([np.flatnonzero(~seen), np.arange(len(seen), length)])
    if not len(left):
        raise SpecError(
            f"--skip-seen leaves nothing to train on: the checkpoint has seen all {length} samples; append new "
            "ones, or leave --skip-seen out."
        )
    return left
