"""What a model is tried on, batch by batch: the test set, or what clients have held back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from shoal.feed.feed import Feed


class TriedBatches(Protocol):
    """The same for all processes."""

    feed: Feed
    """Who reads them."""

    def __len__(self) -> int: ...

    def samples(self, number: int) -> np.ndarray:
        """Those of one batch."""


class TestBatches:
    """All of a data set, in its order."""

    def __init__(self, feed: Feed, length: int, size: int) -> None:
        self.feed = feed
        self._length, self._size = length, size

    def __len__(self) -> int:
        return -(-self._length // self._size)

    def samples(self, number: int) -> np.ndarray:
        first = number * self._size
        return np.arange(first, min(first + self._size, self._length))


class ClientBatches:
    """What each client has held back of its samples; no batch is of two clients."""

    def __init__(self, feed: Feed, held: Sequence[np.ndarray], size: int) -> None:
        self.feed = feed
        self._batches = [
            (client, part[first : first + size])
            for client, part in enumerate(held)
            for first in range(0, len(part), size)
        ]
        self._owners = torch.tensor([client for client, _ in self._batches], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._batches)

    def samples(self, number: int) -> np.ndarray:
        return self._batches[number][1]

    def by_client(self, table: torch.Tensor, columns: Mapping[str, int]) -> dict[str, list[Any]]:
        """Of a table with a row for each batch, its weight first: the number of each client whose samples count,
        what they count, and each column's mean over them."""
        weights = table[:, 0]
        totals = torch.zeros(int(self._owners.max()) + 1, dtype=table.dtype).index_add_(0, self._owners, weights)
        counted = totals.nonzero()[:, 0]
        found: dict[str, list[Any]] = {"client": counted.tolist(), "weight": totals[counted].tolist()}
        for name, column in columns.items():
            sums = torch.zeros_like(totals).index_add_(0, self._owners, table[:, column] * weights)
            found[name] = (sums / totals)[counted].tolist()
        return found


def most_batches(length: int, held: Sequence[np.ndarray], size: int) -> int:
    """Of what is tried at a time: the test set, or what clients hold back."""
    return max(-(-length // size), sum(-(-len(part) // size) for part in held))


def client_summary(by_client: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """The mean over what all clients have held back, and the client that fares worst: of the loss the highest, of
    metrics the lowest."""
    weights = np.asarray(by_client["weight"])
    found = {}
    for name, values in by_client.items():
        if name in ("client", "weight"):
            continue
        found[f"client_{name}"] = float(np.average(values, weights=weights))
        worst = "highest_client_loss" if name == "loss" else f"lowest_client_{name}"
        found[worst] = max(values) if name == "loss" else min(values)
    return found
