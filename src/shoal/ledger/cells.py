"""`CellSet`: which parts of the data are done, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shoal.errors import ProtocolError


class CellSet:
    """A set of cell numbers that fills up from 0: all below a mark, and a few above it."""

    def __init__(self, cells: Iterable[int] = (), *, below: int = 0) -> None:
        self._below = below
        self._above: set[int] = set()
        for cell in cells:
            self.add(cell)

    def add(self, cell: int) -> None:
        """Put a cell in; one that is in already stays."""
        if cell < self._below:
            return
        self._above.add(cell)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def __contains__(self, cell: int) -> bool:
        return 0 <= cell < self._below or cell in self._above

    def __len__(self) -> int:
        return self._below + len(self._above)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellSet) and self.to_plain() == other.to_plain()

    __hash__ = None  # type: ignore[assignment]

    def missing(self, total: int) -> Iterator[int]:
        """The cells below `total` that are not in."""
        return (cell for cell in range(self._below, total) if cell not in self._above)

    def to_plain(self) -> list[Any]:
        """Plain data that `from_plain` reads."""
        return [self._below, sorted(self._above)]

    @classmethod
    def from_plain(cls, plain: Any) -> CellSet:
        """The set that `to_plain` wrote; `ProtocolError` for anything else."""
        match plain:
            case [int(below), list(above)] if below >= 0 and all(type(c) is int and c >= 0 for c in above):
                return cls(above, below=below)
        raise ProtocolError("What should be a set of cells is not [below, [above, …]].")
