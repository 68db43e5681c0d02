"""What follows from the coordinator's tables, whatever changed them: seats, holders, orders, views, the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.coordinator.holding import planned_hold
from shoal.coordinator.leases import Leases, Recovery
from shoal.coordinator.members import SERVER, WORKER, Member, MemberOrder, Seat
from shoal.coordinator.plan import JobPlan
from shoal.coordinator.reports import Reports, audit
from shoal.coordinator.shards import ShardTable
from shoal.coordinator.state import JobState
from shoal.coordinator.store import DurableStore, StoreError, Superseded
from shoal.layout import spread_backups
from shoal.ps.messages import NOBODY, PsMessage, ShardView, View

STORE_RETRY_S = 1.0
STORE_PATIENCE_S = 15.0
"""How long a store may refuse before the run is given up."""
FINAL_REPORTS = 2
"""The second report of a shard after the last cell was surely made after it; the first may have been under way."""


class Upkeep:
    """A coordinator without its ears: `_settle` looks at all tables once, does what follows, and tells."""

    def __init__(self, plan: JobPlan, store: DurableStore, now: float) -> None:
        self.plan = plan
        self.outbox: deque[tuple[int, PsMessage]] = deque()
        self.orders: deque[MemberOrder] = deque()
        """What the launcher is to do."""
        self.events: deque[dict[str, Any]] = deque()
        """Every decision, as plain data."""
        self.failed: str | None = None
        """Why the job cannot go on, in a sentence."""
        self.finished: dict[str, Any] | None = None
        """The audit, once the job is done."""
        self.superseded = False
        """Another coordinator has taken over: nothing more is said here."""
        self.wakeup = now
        self._store = store
        self.term, saved = _claim(store)
        self._state = JobState(plan, saved or {}, now)
        self._reports = Reports()
        self._view: View | None = None
        """The newest view that is saved: the only one to be told."""
        self._changed = saved is not None
        self._retry_at = now
        self._unsaved_since: float | None = None
        """Since when the store has refused what is decided."""
        self._failures = 0
        self._committed = 0
        self._final_reports: Counter[int] | None = None
        grace_s = plan.form_timeout_s - plan.start_timeout_s if saved is None else 0.0
        self._ordered: dict[Seat, float] = dict.fromkeys(self._state.seats(), now + grace_s)
        """When somebody was last told to fill a seat that is free. The first ones start without an order."""
        if saved is None and (hold := planned_hold(plan.borders)) is not None:
            self._state.settings["hold"] = hold
        self._leases = Leases(plan.num_cells, settled=saved is None)
        self._limit_leases()
        self._recovery: Recovery | None = None
        if saved is not None and plan.leased:
            workers = self._state.members.seats(WORKER).values()
            self._recovery = Recovery(self._state.coming, workers, plan.num_shards)
        if saved is not None:
            self._decide("takeover", "an earlier coordinator left its state", term=self.term)

    @property
    def committed(self) -> int:
        """Cells that are known to be done."""
        return self._committed

    @property
    def view(self) -> View | None:
        """The newest view that was told."""
        return self._view

    @property
    def _is_trained(self) -> bool:
        """Whether every cell is done. Shards are kept safe after that too, until the launcher ends the job."""
        all_are_done = self._state.done_ranks.issuperset(range(self._state.wanted[WORKER]))
        if not self.plan.leased or "stop" in self._state.settings:
            return all_are_done
        return self._leases.complete

    @property
    def _may_be_done(self) -> bool:
        """Whether a worker that has nothing more to do is done; else it was told to leave."""
        return not self.plan.leased or self._leases.complete or "stop" in self._state.settings

    def _settle(self, now: float) -> None:
        if self.failed is None:
            self._fill_seats(now)
            if self._state.table is None:
                self._form()
            else:
                self._repair(self._state.table)
            self._deal_slots()
            self._order_missing(now)
        self._count_progress()
        self._publish(now)
        if self._view is not None and not self._changed:
            for control in self._state.controls.due(self.term, now):
                self.outbox.append((self._view.shard_views[control.shard].primary, control))
        self._finish()

    def _fill_seats(self, now: float) -> None:
        for member in self._state.members.admit(self._state.seats(), since=now - self.plan.silent_after_s):
            self._ordered.pop(member.seat, None)
            self._changed = True
            self._decide("joined", "its seat was free", node=member.node, role=member.role, rank=member.rank)
        for member in self._state.members.beyond(self._state.wanted):
            self._state.members.remove(member.node)  # It was on its way when fewer were asked for.
            self._ordered.pop(member.seat, None)  # Once more are asked for again, another is to come.
            self._end(member, f"the job has fewer {member.role}s now")

    def _form(self) -> None:
        """Make the first view once all servers are there. Copies start from the same values: all are filled."""
        servers = self._state.members.seats(SERVER)
        if len(servers) < self.plan.servers:
            return
        shards = [
            ShardView(
                generation=self._state.coming,
                primary=servers[owner],
                backup=NOBODY if backup is None else servers[backup],
                filled=backup is not None,
            )
            for owner, backup in zip(self.plan.owners, self._first_backups(servers), strict=True)
        ]
        self._state.table = ShardTable(shards, self.plan.shard_bytes, shares_memory=self.plan.shares_memory)
        self._decide("formed", "all servers are there", servers=len(servers), shards=len(shards))

    def _first_backups(self, servers: Mapping[int, int]) -> Sequence[int | None]:
        """As planned; but where servers are on several hosts, on others than the owners."""
        hosts = {number: self._state.members[node].host for number, node in servers.items()}
        if len(set(hosts.values())) == 1 or not self.plan.replicas:
            return self.plan.backups
        return spread_backups(self.plan.owners, range(self.plan.servers), hosts)

    def _repair(self, table: ShardTable) -> None:
        """Give shards the holders they lack, take the next steps of moves, and let those go that hold nothing."""
        servers, wanted = self._state.members.seats(SERVER), self._state.wanted[SERVER]
        table.hosts = self._state.members.hosts
        for change in self._state.moves.advance(table, servers, wanted, self._state.coming):
            self._changed = True
            self._decide(change.what, change.why, **change.numbers)
        for rank, node in servers.items():
            if rank >= wanted and not table.involves(node):
                self._dismiss(node, "the job has fewer servers now")

    def _deal_slots(self) -> None:
        """Where workers have slots of their own, give them out as those come and go, and let the others leave."""
        if (deal := self._state.deal) is None:
            return
        workers, wanted = self._state.members.seats(WORKER), self._state.wanted[WORKER]
        # While all are on their way to a border, what is where stays there: else nobody knew how far it is.
        may_recall = "hold" not in self._state.settings
        self._changed |= deal.advance(workers, wanted, self._state.coming, may_recall=may_recall)
        for rank, node in workers.items():
            if rank >= wanted and node not in deal.owners:
                self._dismiss(node, "the job has fewer workers now")

    def _order_missing(self, now: float) -> None:
        """Order somebody for every free seat, again if nobody has come for long."""
        for seat in sorted(self._state.seats()):
            if self._state.members.is_taken(seat):
                continue
            if now - self._ordered.get(seat, float("-inf")) >= self.plan.start_timeout_s:
                self._ordered[seat] = now
                self.orders.append(MemberOrder(action="start", role=seat[0], rank=seat[1]))
                self._decide("start", "its seat is free", role=seat[0], rank=seat[1])

    def _dismiss(self, node: int, why: str) -> None:
        """A member leaves by decision: nobody is to take its place."""
        self._end(self._remove(node), why)

    def _remove(self, node: int) -> Member:
        member = self._state.members.remove(node)
        assert member is not None
        self._reports.forget(node)
        if member.role == WORKER:
            self._release(member)
        self._changed = True
        return member

    def _end(self, member: Member, why: str) -> None:
        self._changed = True
        self.orders.append(MemberOrder(action="end", role=member.role, rank=member.rank, node=member.node))
        self._decide("end", why, node=member.node, role=member.role, rank=member.rank)

    def _lose(self, node: int, why: str) -> None:
        """A node is gone: backups take over its shards, others its cells."""
        member = self._state.members.remove(node)
        if member is None or self.failed is not None:
            return
        self._changed = True
        self._reports.forget(node)
        self._ordered.pop(member.seat, None)
        self._decide("lost", why, node=node, role=member.role, rank=member.rank)
        if member.role == SERVER and self._state.table is not None:
            self._lose_server(member, self._state.table)
        elif member.role == WORKER:
            self._release(member)
        if member.seat in self._state.seats():
            self._count_failure()

    def _miss(self, seat: Seat) -> None:
        """Whoever was on its way to this seat is dead: another is ordered at once, or when it is wanted again."""
        if self.failed is not None or self._state.members.is_taken(seat):
            return
        self._ordered.pop(seat, None)
        if seat in self._state.seats():
            self._decide("lost", "its process ended before it joined", role=seat[0], rank=seat[1])
            self._count_failure()

    def _leave(self, node: int, rank: int) -> None:
        """A worker had nothing more to do and is gone. All was trained on, or it was told to leave.

        Which of them, a coordinator that took over does not know until everybody has spoken to it.
        """
        was_told_to = node in self._state.members.gone
        if node in self._state.members:
            self._remove(node)
        else:
            self._state.members.remove(node)
        self._let_go(node)
        if was_told_to and not self.plan.leased:
            return
        if self._may_be_done or self._recovery is not None:
            self._changed |= rank not in self._state.done_ranks
            self._state.done_ranks.add(rank)

    def _let_go(self, node: int, number: int | None = None) -> None:
        """A node knows this view, or its process has ended: others may have the homes that were its own."""
        if self._state.table is not None:
            self._state.table.let_go(node, number)

    def _lose_server(self, member: Member, table: ShardTable) -> None:
        loss = table.lose(member.node, self._state.coming)
        self._state.controls.hurry()
        if loss.promoted:
            self._decide("promoted", "their primary is lost", shards=loss.promoted, node=member.node)
        if loss.orphaned and not self.plan.outlives_servers:
            advice = "with servers=2" if self.plan.has_copies else "with replicas=1 and two servers"
            self._fail(
                f"Server {member.rank} is lost and nobody else has all of shard {loss.orphaned[0]}; start the run "
                f"again, {advice} or more."
            )
        self._state.moves.await_heir(loss.orphaned, member.rank)

    def _release(self, member: Member) -> None:
        """Nobody waits for a worker that is gone, and others get its cells."""
        if self._recovery is not None:
            self._recovery.on_lost(member.node)
        if self._state.deal is not None:
            self._state.deal.release(member.node)
        if cells := self._leases.release(member.node):
            self._decide("reissued", "the worker that held them is gone", cells=cells, rank=member.rank)

    def _limit_leases(self) -> None:
        """While the workers are held, nothing beyond the border is handed out."""
        hold = self._state.settings.get("hold")
        self._leases.limit = hold[1] if hold is not None and self.plan.leased else None

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures > self.plan.failures_allowed:
            self._fail(f"{self._failures} members were lost while nothing was trained; their output may say why.")

    def _count_progress(self) -> None:
        """Note which cells are done; progress forgives the failures before it."""
        if self.plan.leased and self._leases.wants_confirmation:
            everywhere = self._reports.everywhere(self.plan.num_shards)
            if self._recovery is not None and self._recovery.is_over:
                self._recovery = None
                self._leases.settle(everywhere)
                if not self._may_be_done:
                    self._state.done_ranks.clear()  # Whoever left had been told to, by one who knew.
            else:
                self._leases.confirm(everywhere)
        known = self._leases.committed if self.plan.leased else self._reports.least_cells(self.plan.num_shards)
        if known > self._committed:
            self._committed, self._failures = known, 0

    def _publish(self, now: float) -> None:
        """Save the new view; only then tell it. What nobody could have seen is never lost."""
        if not self._changed or self._state.table is None or now < self._retry_at:
            return
        try:
            self._store.save(self.term, self._state.plain())
        except Superseded as error:
            self._step_down(str(error))
            return
        except StoreError as error:
            self._retry_at = now + STORE_RETRY_S
            self._bear_with_store(str(error), now)
            return
        self._changed, self._unsaved_since = False, None
        self._state.number += 1
        self._view = self._state.view(self.term)
        for node in self._state.members:
            self.outbox.append((node, self._view))

    def _bear_with_store(self, why: str, now: float) -> None:
        """Members go on with the view that they know; but who waits for a new one must not wait for ever."""
        if self._unsaved_since is None:
            self._unsaved_since = now
            self._decide("unsaved", why)
        elif now - self._unsaved_since >= STORE_PATIENCE_S:
            self._fail(f"For {STORE_PATIENCE_S:.0f} s nothing that was decided could be saved: {why}")

    def _tell(self, node: int) -> None:
        if self._view is not None:
            self.outbox.append((node, self._view))

    def _step_down(self, why: str) -> None:
        self.superseded = True
        self.wakeup = float("inf")
        self.outbox.clear()
        self.orders.clear()
        self._decide("superseded", why, term=self.term)

    def _fail(self, sentence: str) -> None:
        if self.failed is None:
            self.failed = sentence
            self._state.settings |= {"stop": sentence, "failed": True}
            self._changed = True
            self._decide("failed", sentence)

    def _finish(self) -> None:
        """When everything is trained on, wait for the shards' last word, and audit."""
        if not self._is_trained or self.failed is not None or self.finished is not None:
            return
        if self._final_reports is None:
            self._final_reports = Counter()
        have_all = self._reports.least_cells(self.plan.num_shards) >= self.plan.num_cells
        if have_all or min(self._final_reports[s] for s in range(self.plan.num_shards)) >= FINAL_REPORTS:
            self.finished = audit(self.plan, self._reports.shards)
            self._decide("finished", "all cells are done", audit=self.finished)

    def _decide(self, what: str, why: str, **numbers: Any) -> None:
        self.events.append({"what": what, "why": why, **numbers})


def _claim(store: DurableStore) -> tuple[int, dict[str, Any] | None]:
    """The next term, and the state it starts from. Read after the claim: from then on no other can change it."""
    term = store.load()[0] + 1
    if not store.claim(term):
        raise Superseded(f"Another coordinator claimed term {term} at the same time; leave the job to it.")
    return term, store.load()[1]
