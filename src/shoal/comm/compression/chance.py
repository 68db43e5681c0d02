"""Random numbers of compressions: the same in every repetition of a run, and others in every call."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping

import torch

_COUNT = "count/"


class KeyedChance:
    """Numbers calls by the tensor's key, and makes a generator of each number."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}

    def seed(self, key: Hashable) -> int:
        """For the next call under this key."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return zlib.crc32(repr(key).encode()) << 31 | count & 0x7FFFFFFF

    def forget(self, key: Hashable) -> None:
        """Begin anew with this key."""
        self._counts.pop(key, None)

    def remembered(self) -> dict[str, torch.Tensor]:
        """The numbers, as a compression tells what it remembers."""
        return {f"{_COUNT}{key}": torch.tensor([count]) for key, count in self._counts.items()}

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `remembered` gave."""
        found = {name: int(one) for name, one in state.items() if name.startswith(_COUNT)}
        self._counts = {name.removeprefix(_COUNT): count for name, count in found.items()}


def generator_of(seed: int) -> torch.Generator:
    """The same numbers for the same seed, wherever it is."""
    return torch.Generator().manual_seed(seed)
