"""A worker's side of leases: it always has the next cell at hand, and says which are done until that is heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shoal.ps.messages import Lease, LeaseRequest


class LeaseHolder:
    """The cells that a worker has been given."""

    def __init__(self, *, now: float, ahead: int = 1, patience_s: float = 0.5) -> None:
        self.due = now
        """When to ask (again)."""
        self.is_over = False
        """There will be no more cells."""
        self.is_dry = False
        """The coordinator was asked for more than it had: others hold the last cells."""
        self.committed = 0
        """Cells of the whole run that are known to be done."""
        self.loss: list[float] = []
        """The newest that the coordinator knows of, if any."""
        self._ahead = ahead
        self._patience_s = patience_s
        self._term = 0
        self._asked = self._answered = 0
        """The ticket of the last request, and of the newest one that was answered."""
        self._ready: deque[int] = deque()
        self._begun: set[int] = set()
        """Taken, and not yet acknowledged by every shard."""
        self._apart: set[int] = set()
        """Each of these is to be pushed by itself."""
        self._to_tell: set[int] = set()
        """Done, and the coordinator may not know it."""

    @property
    def held(self) -> list[int]:
        """Every cell that was given and is not done."""
        return sorted({*self._begun, *self._ready})

    @property
    def at_hand(self) -> list[int]:
        """The cells that come next."""
        return list(self._ready)

    def is_closed(self, cells: Sequence[int]) -> bool:
        """Whether nothing may be pushed together with these: one that stays by itself is among them, or next."""
        return bool(cells) and (cells[0] in self._apart or not self._apart.isdisjoint(self._ready))

    def take(self, now: float) -> int | None:
        """The next cell to train on, those first that stay by themselves; None where none is at hand."""
        if not self._ready:
            return None
        first = self._ready[0]
        cell = next((cell for cell in self._ready if cell in self._apart), first) if self._apart else first
        self._ready.remove(cell)
        self._begun.add(cell)
        # Asked for while this one is trained on, the next is there in time.
        self.due = min(self.due, now)
        return cell

    def set_apart(self, cells: Iterable[int]) -> None:
        """A shard that had some of these, which were pushed together, could take none: again, one by one."""
        for cell in cells:
            self._begun.discard(cell)
            self._apart.add(cell)
            self._ready.append(cell)

    def finish(self, cells: Iterable[int], now: float) -> None:
        """Every shard has acknowledged these."""
        for cell in cells:
            self._begun.discard(cell)
            self._apart.discard(cell)
            self._to_tell.add(cell)
        self.due = min(self.due, now)

    def on_lease(self, lease: Lease, now: float) -> None:
        """Take over the coordinator's list. It may be older than what was told; then it is corrected next time.

        What was told and is no longer listed is heard, and forgotten: answers that come late would bring it back.
        """
        if lease.term < self._term or not self._answered <= lease.ticket <= self._asked:
            return
        self._term, self._answered = lease.term, lease.ticket
        self.is_over = lease.over
        self.committed = max(self.committed, lease.committed)
        self.loss = lease.loss
        self._to_tell &= set(lease.cells)
        self.is_dry = lease.dry
        self._ready = deque(c for c in lease.cells if c not in self._to_tell and c not in self._begun)
        if not self._to_tell and (self.is_over or len(self._ready) >= self._ahead):
            self.due = float("inf")
        else:
            self.due = min(self.due, now + self._patience_s)

    def on_term(self, term: int, now: float) -> None:
        """A new coordinator does not know who holds what, and hands out nothing before all have told it."""
        if term > self._term:
            self._term = term
            self.due = now

    def request(self, node: int, rank: int, now: float, loss: Sequence[float] = ()) -> LeaseRequest:
        """What to tell the coordinator now; again after a while, unless its answer leaves nothing to ask."""
        self.due = now + self._patience_s
        self._asked += 1
        wanted, done = len(self._begun) + self._ahead, sorted(self._to_tell)
        return LeaseRequest(
            node=node, rank=rank, ticket=self._asked, wanted=wanted, done=done, held=self.held, loss=list(loss)
        )
