"""`Counted`: a length for data that has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Counted:
    """Data that can only be gone through, with a length: so many samples as its first pass has.

    Every process goes through it once to count them, before it trains.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._length: int | None = None

    def __len__(self) -> int:
        if self._length is None:
            self._length = sum(1 for _ in self._source)
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in ("skip", "set_epoch"):  # what the source can, this can
            return getattr(self._source, name)
        raise AttributeError(f"Counted has no {name!r}.")
