"""The order of an epoch: a permutation computed by index, so that it is never stored.

A balanced Feistel network permutes the next power of four above the length; positions that fall outside are
sent through it again until they land inside (cycle walking), which leaves a permutation of the length itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_ROUNDS = 6
_BLOCK = 1 << 15
_MASK64 = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash whole numbers into 64 bits (splitmix64's finalizer over each)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK64)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


class EpochOrder(Protocol):
    """Which sample comes at which position of an epoch: a function of the seed and the epoch alone."""

    length: int
    """Positions of every epoch."""

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` of an epoch."""
        ...


class Order:
    """Every sample once in an epoch, shuffled or as they lie."""

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._half_bits = max(1, (max(1, length - 1).bit_length() + 1) // 2)
        self._block: tuple[int, int, np.ndarray] | None = None

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` of an epoch."""
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.int64)
        parts = [np.empty(0, dtype=np.int64)] if start == stop else []
        while start < stop:
            first = start // _BLOCK * _BLOCK
            end = min(stop, first + _BLOCK)
            parts.append(self._permuted_block(epoch, first)[start - first : end - first])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permuted_block(self, epoch: int, first: int) -> np.ndarray:
        # Consecutive batches come from one block: permuting it at once costs far less than batch by batch.
        # Threads may ask at the same time: what was found is used, not read again.
        block = self._block
        if block is None or block[:2] != (epoch, first):
            positions = np.arange(first, min(first + _BLOCK, self.length), dtype=np.uint64)
            block = self._block = (epoch, first, self._permute(epoch, positions))
        return block[2]

    def _permute(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        keys = [np.uint64(mix(self._seed, epoch, number)) for number in range(_ROUNDS)]
        result = self._feistel(positions, keys)
        while (outside := result >= self.length).any():
            result[outside] = self._feistel(result[outside], keys)
        return result.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            hashed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((hashed >> np.uint64(32)) & mask)
        return (left << bits) | right
