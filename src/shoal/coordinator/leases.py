"""Leases: which worker trains on which cell, so that every cell is trained on and no two living workers share one.

Requests and answers may be lost, repeated or late. A request therefore says how many cells the worker wants to
hold in all, and an answer lists all that it holds, those included that it has pushed and that are not yet
acknowledged everywhere: asking twice changes nothing.

A coordinator that takes over does not know who holds what. It hands out nothing until every worker has said what
it holds and every shard which cells it has (`settle`); what nobody holds and not every shard has is then free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from shoal.ledger.cells import CellSet

AHEAD = 1 << 16
"""Cells are handed out so far beyond the first that is not done: what is told about them stays small, however long
that one takes."""


class Leases:
    """All cells of a run: done, held by a worker, or free."""

    def __init__(self, num_cells: int, *, settled: bool = True) -> None:
        self._num_cells = num_cells
        self._done = CellSet()
        self._holders: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        self._returned: list[int] = []
        """A heap of cells that came back; those that turned out to be done are skipped when they come up."""
        self._next = 0
        self._settled = settled
        self.limit: int | None = None
        """Cells from here on are held back for now."""
        self.loss: list[float] = []
        """The newest that a worker has told, if any."""

    @property
    def committed(self) -> int:
        """Cells that are done."""
        return len(self._done)

    @property
    def complete(self) -> bool:
        """Whether every cell is done."""
        return len(self._done) == self._num_cells

    @property
    def settled(self) -> bool:
        """Whether it is known what everybody holds."""
        return self._settled

    @property
    def wants_confirmation(self) -> bool:
        """Whether knowing what the shards have could save work: cells have come back, or all are given."""
        return not self.complete and (not self._settled or bool(self._returned) or self._next >= self._num_cells)

    def border(self, slots: int, *, at_least: int = 0) -> int:
        """The end of the last step of which a cell was handed out, as a number of cells, and not below another."""
        return min(-(-max(self._next, at_least) // slots) * slots, self._num_cells)

    def held_by(self, node: int) -> list[int]:
        """The cells that a worker holds."""
        return sorted(self._held.get(node, ()))

    def ask(self, node: int, *, wanted: int, done: Iterable[int], held: Iterable[int]) -> list[int]:
        """Note what a worker has done and holds, give it cells until it holds `wanted`, and say all it holds."""
        for cell in done:
            if 0 <= cell < self._num_cells:
                self._commit(cell)
        if not self._settled:
            for cell in held:
                if 0 <= cell < self._num_cells and cell not in self._done and cell not in self._holders:
                    self._give(cell, node)
        while len(self._held.get(node, ())) < wanted and (cell_free := self._take()) is not None:
            self._give(cell_free, node)
        return self.held_by(node)

    def confirm(self, cells: CellSet) -> None:
        """These cells are in every shard, whatever became of the workers that pushed them."""
        for cell in [*self._holders, *self._returned]:
            if cell in cells:
                self._commit(cell)

    def settle(self, cells: CellSet) -> None:
        """Everybody has spoken, and every shard has these: what is neither in them nor held is free now."""
        self._done = CellSet.in_at_least(1, [self._done, cells])
        self.confirm(cells)
        # Handed out by the coordinator before: what is done or held, and with it all that lies between.
        self._next = max(self._next, self._done.end, *(cell + 1 for cell in self._holders))
        self._returned = [cell for cell in self._done.missing(self._next) if cell not in self._holders]
        self._settled = True

    def release(self, node: int) -> list[int]:
        """A worker is gone: its cells are given to others before any new one. Returns them."""
        cells = self.held_by(node)
        for cell in cells:
            self._drop_holder(cell)
            heapq.heappush(self._returned, cell)
        return cells

    def _take(self) -> int | None:
        """A free cell: one that came back, else the next."""
        if not self._settled:
            return None
        while self._returned:
            cell = heapq.heappop(self._returned)
            if self._is_free(cell):
                return cell
        end = min(self._num_cells, self._done.below + AHEAD)
        while self._next < (end if self.limit is None else min(self.limit, end)):
            self._next += 1
            if self._is_free(self._next - 1):
                return self._next - 1
        return None

    def _is_free(self, cell: int) -> bool:
        return cell not in self._done and cell not in self._holders

    def _give(self, cell: int, node: int) -> None:
        self._holders[cell] = node
        self._held.setdefault(node, set()).add(cell)

    def _commit(self, cell: int) -> None:
        self._drop_holder(cell)
        self._done.add(cell)

    def _drop_holder(self, cell: int) -> None:
        node = self._holders.pop(cell, None)
        if node is not None:
            self._held[node].discard(cell)
            if not self._held[node]:
                del self._held[node]


class Recovery:
    """Who has to speak under the new view: every worker that was there, about its cells, and every shard."""

    def __init__(self, view_number: int, workers: Iterable[int], num_shards: int) -> None:
        self._view_number = view_number
        self._workers = set(workers)
        self._current: set[int] = set()
        self._shards = set(range(num_shards))

    @property
    def is_over(self) -> bool:
        """Whether all have spoken."""
        return not self._workers and not self._shards

    def on_report(self, node: int, view_number: int, shards: Iterable[int]) -> None:
        """A member reported. What it sent under an older view may be out of date and does not count."""
        if view_number >= self._view_number:
            self._current.add(node)
            self._shards.difference_update(shards)

    def on_request(self, node: int) -> None:
        """A worker said what it holds. It keeps the order of its messages, so this came after its report."""
        if node in self._current:
            self._workers.discard(node)

    def on_lost(self, node: int) -> None:
        """Nobody waits for the dead."""
        self._workers.discard(node)
