"""Whole copies that update on their own, and tell each other what they changed.

Every few updates, and soon after the last, a copy makes a change of all that its own workers pushed since, and
scatters it to the others, who add it. Changes are numbered; the next is made when every other copy has asked for
it, which says that it has all before. So each change is added once, and in the end all copies have all of them.
A part's round is the change's number here, and a request asks for the change of that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.ledger.cells import CellSet
from shoal.ps.between_servers import PartRequest, RoundPart, Settle
from shoal.ps.messages import NOBODY
from shoal.ps.settlement import Tell
from shoal.ps.shard import Shard

CELLS_AT_ONCE = 4
LATEST_S = 0.05
"""How long a change may wait for more."""


class Scatter:
    """One copy's side of it: as `AllToAll`, but nobody waits for anybody."""

    def __init__(self, number: int, shard: Shard, tell: Tell, patience_s: float) -> None:
        self.due = float("inf")
        self.primaries: Sequence[int] = ()
        self._number = number
        self._shard = shard
        self._tell = tell
        self._patience_s = patience_s
        self._told = CellSet(below=shard.rules.start * shard.rules.slots)
        """The cells that came from others, or that they have been sent."""
        self._change: RoundPart | None = None
        """The last that was made."""
        self._awaited: set[int] = set()
        """The copies that have not asked for the next."""
        self._taken: dict[int, int] = {}
        """By copy: the number of its last change that is in."""
        self._came: list[RoundPart] = []

    def on_part(self, part: RoundPart) -> None:
        taken = self._taken.get(part.origin, 0)
        if part.round == taken + 1 and part.origin != self._number and self._fits(part):
            self._came.append(part)
            self._taken[part.origin] = taken = part.round
        if 0 <= part.origin < len(self.primaries):
            request = PartRequest(shard=part.origin, origin=self._number, round=taken + 1)
            self._tell(self.primaries[part.origin], request)

    def on_request(self, sender: int, request: PartRequest) -> None:
        if self._change is not None and request.round == self._change.round + 1:
            self._awaited.discard(request.origin)
            if not self._awaited:
                self.due = float("inf")

    def close(self, now: float) -> Settle | None:
        if self._came:
            part = self._came.pop(0)
            for cell in part.facts["cells"]:
                self._told.add(cell)
            return Settle(
                shard=self._number,
                round=part.round,
                factor=1.0,
                facts={},
                kept_frames=0,
                total=part.facts,
                frames=part.frames,
            )
        if not self._awaited and (cells := self._new_cells()):
            self.due = min(self.due, now + LATEST_S)
            if len(cells) >= CELLS_AT_ONCE or now >= self.due:
                self._scatter(cells, now)
        return None

    def repeat(self, now: float) -> None:
        self.due = now + self._patience_s if self._awaited else float("inf")
        self._tell_awaited()

    def _new_cells(self) -> list[int]:
        """What this copy's own workers have trained on since the last change."""
        return [cell for cell in self._told.missing(self._shard.cells.end) if cell in self._shard.cells]

    def _scatter(self, cells: list[int], now: float) -> None:
        number = 1 if self._change is None else self._change.round + 1
        frames = self._shard.values.own_part((), scale=1.0)
        self._change = RoundPart(
            shard=NOBODY, origin=self._number, round=number, facts={"cells": cells}, frames=frames
        )
        for cell in cells:
            self._told.add(cell)
        self._awaited = set(range(len(self.primaries))) - {self._number}
        self.due = now + self._patience_s if self._awaited else float("inf")
        self._tell_awaited()

    def _tell_awaited(self) -> None:
        for shard in sorted(self._awaited):
            assert self._change is not None
            self._tell(self.primaries[shard], replace(self._change, shard=shard))

    def _fits(self, part: RoundPart) -> bool:
        match part.facts:
            case {"cells": list()}:
                return self._shard.values.fits_part(part.origin, part.frames)
        return False
