"""Who fills which slot, where every worker has its own: neighbouring ones, as equally as it goes.

A slot changes hands in two steps, each in a view of its own: its owner is told that another is to have it, and
when it has let it go the other gets it. A dead owner has let go of everything. Slot 0 is always the first
worker's, which saves between two steps: nobody can close the next one without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.ps.messages import NOBODY
from shoal.spec.conduct import even_fills


class SlotDeal:
    """By slot: the node that fills it, how many did before, and the number of the view that says so."""

    def __init__(
        self, num_slots: int, rows: Sequence[Sequence[int]] = (), recalled: Mapping[int, int] | None = None
    ) -> None:
        self._rows = [list(row) for row in rows] or [[NOBODY, -1, 0] for _ in range(num_slots)]
        self._recalled = dict(recalled or {})
        """By slot: the number of the view that tells its owner to let it go."""

    def plain(self) -> tuple[list[list[int]], dict[int, int]]:
        """The same as plain data."""
        return self._rows, self._recalled

    def told(self) -> dict[str, Any]:
        """What members are told of it."""
        return {"slots": [[node, lives] for node, lives, _ in self._rows], "recalled": sorted(self._recalled)}

    @property
    def owners(self) -> list[int]:
        """By slot: who fills it; NOBODY where nobody does."""
        return [node for node, _, _ in self._rows]

    @property
    def gifts(self) -> list[tuple[int, int]]:
        """By slot: who fills it, and the number of the view that gave it away."""
        return [(node, given_in) for node, _, given_in in self._rows]

    def release(self, node: int) -> None:
        """A worker is gone, and with it its hold on any slot."""
        for slot, owner in enumerate(self.owners):
            if owner == node:
                self._free(slot)

    def let_go(self, node: int, number: int) -> None:
        """A worker works on what is its own by this view: what was recalled in it, or before, is free."""
        for slot, recalled_in in list(self._recalled.items()):
            if self.owners[slot] == node and recalled_in <= number:
                self._free(slot)

    def advance(self, workers: Mapping[int, int], wanted: int, coming: int, *, may_recall: bool = True) -> bool:
        """Take the next steps towards an equal deal among `wanted` ranks; whether there were any.

        `workers`: rank to node, of those that are there; `coming`: the number of the view that tells of it.
        """
        before = str(self.plain())
        for rank, slots in enumerate(even_fills(len(self._rows), wanted)):
            for slot in slots:
                self._aim(slot, workers.get(rank, NOBODY), coming, may_recall=may_recall)
        return before != str(self.plain())

    def _aim(self, slot: int, node: int, coming: int, *, may_recall: bool) -> None:
        owner, lives, _ = self._rows[slot]
        if owner == NOBODY and node != NOBODY:
            self._rows[slot] = [node, lives + 1, coming]
        elif node in (NOBODY, owner):
            self._recalled.pop(slot, None)  # It stays where it is, as long as there is nobody else.
        elif owner != NOBODY and may_recall:
            self._recalled.setdefault(slot, coming)

    def _free(self, slot: int) -> None:
        self._rows[slot][0] = NOBODY
        self._recalled.pop(slot, None)
