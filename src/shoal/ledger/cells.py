"""`CellSet`: which parts of the data are done, however many there are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from shoal.errors import ProtocolError


class CellSet:
    """A set of cell numbers as runs of neighbours: it fills up from 0, so there are few, and each costs the same.

    One cell that is late leaves one gap, however many come after it.
    """

    def __init__(self, cells: Iterable[int] = (), *, below: int = 0) -> None:
        self._edges = [0, below] if below else []
        """Where runs start and stop: start, stop, start, stop, … A cell is in behind an odd number of them."""
        self._count = below
        for cell in cells:
            self.add(cell)

    def add(self, cell: int) -> None:
        """Put a cell in; one that is in already stays."""
        edges, at = self._edges, bisect_right(self._edges, cell)
        if at % 2 or cell < 0:
            return
        self._count += 1
        follows, precedes = at > 0 and edges[at - 1] == cell, at < len(edges) and edges[at] == cell + 1
        # A run's edge that the new cell touches goes; where it touches none, the cell is a run of its own.
        edges[at - follows : at + precedes] = [*(() if follows else (cell,)), *(() if precedes else (cell + 1,))]

    def remove(self, cell: int) -> None:
        """Take a cell out, if it is in."""
        edges, at = self._edges, bisect_right(self._edges, cell)
        if at % 2 == 0:
            return
        self._count -= 1
        starts, stops = edges[at - 1] == cell, edges[at] == cell + 1
        edges[at - starts : at + stops] = [*(() if starts else (cell,)), *(() if stops else (cell + 1,))]

    def __contains__(self, cell: int) -> bool:
        return bool(bisect_right(self._edges, cell) % 2)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (cell for run in self.runs() for cell in run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellSet) and self._edges == other._edges

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CellSet({', '.join(f'{run.start}–{run.stop - 1}' for run in self.runs())})"

    @property
    def below(self) -> int:
        """All cells below this are in."""
        return self._edges[1] if self._edges and self._edges[0] == 0 else 0

    @property
    def end(self) -> int:
        """No cell from here on is in."""
        return self._edges[-1] if self._edges else 0

    def runs(self) -> list[range]:
        """The cells, as runs of neighbours."""
        return [range(start, stop) for start, stop in zip(self._edges[::2], self._edges[1::2], strict=True)]

    def missing(self, total: int) -> Iterator[int]:
        """The cells below `total` that are not in."""
        edges = [0, *self._edges, max(total, self.end)]
        gaps = (range(start, min(stop, total)) for start, stop in list(pairwise(edges))[::2])
        return (cell for gap in gaps for cell in gap)

    def first_runs(self, most: int) -> CellSet:
        """As much of it as so many runs hold, from the lowest on."""
        return self if len(self._edges) <= 2 * most else CellSet.from_plain(self._edges[: 2 * most])

    def copy(self) -> CellSet:
        """Another one with the same cells."""
        other = CellSet()
        other._edges, other._count = list(self._edges), self._count
        return other

    @classmethod
    def in_at_least(cls, wanted: int, sets: Iterable[CellSet]) -> CellSet:
        """The cells that so many of the sets have: all for what they share, 1 for what they are together."""
        steps: Counter[int] = Counter()
        for cells in sets:
            for number, edge in enumerate(cells._edges):
                steps[edge] += -1 if number % 2 else 1
        inside, edges = 0, list[int]()
        for edge in sorted(steps):
            inside += steps[edge]
            if (inside >= wanted) != bool(len(edges) % 2):
                edges.append(edge)
        return cls.from_plain(edges)

    def to_plain(self) -> list[int]:
        """Plain data that `from_plain` reads: where each run starts and stops."""
        return list(self._edges)

    @classmethod
    def from_plain(cls, plain: Any) -> CellSet:
        """The set that `to_plain` wrote; `ProtocolError` for anything else."""
        if not _are_edges(plain):
            raise ProtocolError("What should be a set of cells is not [start, stop, start, stop, …], rising.")
        cells = cls()
        cells._edges = list(plain)
        cells._count = sum(plain[1::2]) - sum(plain[::2])
        return cells


def _are_edges(plain: Any) -> bool:
    return (
        isinstance(plain, list)
        and len(plain) % 2 == 0
        and all(type(edge) is int and edge >= 0 for edge in plain)
        and all(before < after for before, after in pairwise(plain))
    )
