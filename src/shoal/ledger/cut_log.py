"""`CutLog`: how the batches of a run were cut, where that changed on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.errors import ProtocolError
from shoal.ledger.shares import Sizes


class CutLog:
    """From which step on the slots had which sizes; None: even ones, as at the start."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Sizes | None]] = []

    def note(self, from_step: int, sizes: Sequence[int] | None) -> None:
        """From this step on batches are cut to these sizes; what was noted for it and later steps is void."""
        while self._changes and self._changes[-1][0] >= from_step:
            self._changes.pop()
        cut = None if sizes is None else tuple(sizes)
        if cut != (self._changes[-1][1] if self._changes else None):
            self._changes.append((from_step, cut))

    def at(self, step: int) -> Sizes | None:
        """The sizes of a step."""
        place = bisect_right(self._changes, step, key=lambda change: change[0])
        return self._changes[place - 1][1] if place else None

    def changes(self, first: int, last: int) -> Iterator[int]:
        """The steps from the first to the last from which on batches were cut otherwise than before."""
        return (step for step, _ in self._changes if first <= step <= last)

    def __len__(self) -> int:
        return len(self._changes)

    def plain(self) -> list[Any]:
        """Plain data that `from_plain` reads."""
        return [[from_step, None if sizes is None else list(sizes)] for from_step, sizes in self._changes]

    @classmethod
    def from_plain(cls, plain: Any) -> CutLog:
        """The log that `plain` wrote; `ProtocolError` for anything else."""
        log = cls()
        for change in plain if isinstance(plain, list) else [plain]:
            match change:
                case [int(from_step), None]:
                    log.note(from_step, None)
                case [int(from_step), [*sizes]] if sizes and all(type(size) is int for size in sizes):
                    log.note(from_step, sizes)
                case _:
                    raise ProtocolError("What should be a log of cuts is not [[step, [size, …]], …].")
        return log
