"""The coordinator: who takes part, who holds which shard, who trains on which cell. A state machine without I/O.

Whatever happens to it (a message, a tick, a loss) changes its tables here; what follows is in `upkeep.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.coordinator.holding import next_hold
from shoal.coordinator.members import SERVER, WORKER, Member, Seat
from shoal.coordinator.plan import JobPlan
from shoal.coordinator.shards import ShardTable
from shoal.coordinator.store import DurableStore
from shoal.coordinator.upkeep import Upkeep
from shoal.errors import ProtocolError
from shoal.observe.wording import plural
from shoal.ps.between_servers import Filled
from shoal.ps.messages import Controlled, Join, Lease, LeaseRequest, PsMessage, Report

TICK_S = 0.25


class Coordinator(Upkeep):
    """One job's coordinator. Making one claims the next term; `Superseded` if another was faster."""

    def __init__(self, plan: JobPlan, store: DurableStore, now: float) -> None:
        super().__init__(plan, store, now)
        self.ignored: Counter[str] = Counter()
        """Messages that asked for nothing that could be done, by why."""
        self._began_at = self._ticked_at = now
        self._early: dict[int, LeaseRequest] = {}
        """By node: what workers last asked before it was known who holds what; they are answered again then."""

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        """Take in a message."""
        if self.superseded:
            return
        self._state.members.hear(sender, now)
        match message:
            case Join() if message.node == sender:
                self._on_join(message, now)
            case Report() if message.node == sender:
                self._on_report(message)
            case LeaseRequest() if message.node == sender:
                self._on_lease_request(message)
            case Filled():
                self._on_filled(sender, message)
            case Controlled():
                self._state.controls.confirm(message.shard, message.number)
            case _:
                self.ignored[f"unexpected {message.kind}"] += 1
        self._settle(now)

    def _settle(self, now: float) -> None:
        super()._settle(now)
        if self._early and self._leases.settled:
            early, self._early = self._early, {}
            for request in early.values():
                self._on_lease_request(request)

    def on_tick(self, now: float) -> None:
        """Look after the silent, adjust what is to be adjusted, repeat what was not answered."""
        if self.superseded:
            return
        if now - self._ticked_at > self.plan.silent_after_s / 2:
            # Time passed without this process running: the silence was its own.
            self._state.members.hear_all(now)
        self._ticked_at = now
        if self.failed is None:
            self._evict_silent(now)
            self._watch_forming(now)
            self._adjust(now)
        self.wakeup = now + TICK_S
        self._settle(now)

    def on_lost(self, node: int, now: float, seat: Seat | None = None) -> None:
        """A process is known to be dead; `seat` is the one it had, or was to have."""
        if self.superseded:
            return
        never_joined = node not in self._state.members and node not in self._state.members.gone
        self._lose(node, "its process ended")
        if seat is not None and never_joined:
            self._miss(seat)
        self._let_go(node)
        self._settle(now)

    def on_left(self, node: int, rank: int, now: float) -> None:
        """A worker's process has ended after its work was done: nobody is to take its place."""
        if not self.superseded:
            self._leave(node, rank)
            self._settle(now)

    def on_living(self, living: Mapping[int, Seat], now: float, left: Mapping[int, int] | None = None) -> None:
        """Told once this coordinator can hear: all processes of the job that live now, by node, and their seats;
        and the ranks of the workers that have left."""
        if self.superseded:
            return
        for node, rank in (left or {}).items():
            self._leave(node, rank)
        for node in [node for node in self._state.members if node not in living]:
            self._lose(node, "its process ended while nobody coordinated")
        for node in self._state.members.gone:
            if node not in living:
                self._let_go(node)
        members = self._state.members
        for node in sorted(set(members.gone) & set(living)):  # Who decided that may have died before it said so.
            role, rank = living[node]
            self._end(Member(node, role, rank, ""), "it was told to leave")
        coming = {seat for node, seat in living.items() if node not in members and node not in members.gone}
        self._ordered = {seat: self._ordered.get(seat, now) for seat in coming}
        self._settle(now)

    def scale(
        self, *, workers: int | None = None, servers: int | None = None, now: float, why: str | None = None
    ) -> None:
        """Change how many take part while training goes on; what cannot be is refused by an event. `why`: where it
        was not asked for."""
        if self.superseded:
            return
        table = self._state.table
        if table is None or self._is_trained or self.failed is not None:
            self._decide("refused", "only a running job can be scaled")
            return
        if self.plan.has_copies:
            self._decide("refused", "with servers=host every server has its own group of workers")
            return
        if workers is not None:
            self._scale_workers(workers, why or "asked for")
        if servers is not None:
            self._scale_servers(servers, table)
        self._settle(now)

    def _scale_workers(self, workers: int, why: str) -> None:
        if self.plan.why_workers_stay:
            self._decide("refused", self.plan.why_workers_stay)
        elif not 1 <= workers <= self.plan.most_workers:
            most, hint = self.plan.most_workers, "" if self.plan.leased else "; --slots sets how many there may be"
            self._decide("refused", f"this job has room for 1 to {most} workers, not {workers}{hint}")
        elif workers != self._state.wanted[WORKER]:
            self._decide("scale", why, workers=workers, before=self._state.wanted[WORKER])
            self._state.wanted[WORKER] = workers
            self._changed = True
            if self.plan.leased:
                self._control("members", ranks=list(range(workers)))

    def _scale_servers(self, servers: int, table: ShardTable) -> None:
        most = self.plan.num_shards * (1 + self.plan.replicas)
        if servers < 1:
            self._decide("refused", f"a job needs at least one server, asked for {servers}")
        elif servers > most:
            each = "one copy of each" if self.plan.replicas else "no copies"
            self._decide(
                "refused",
                f"the model is cut into {plural(self.plan.num_shards, 'shard')} with {each}, so more than "
                f"{plural(most, 'server')} would hold nothing, asked for {servers}",
            )
        elif servers != self._state.wanted[SERVER]:
            self._decide("scale", "asked for", servers=servers, before=self._state.wanted[SERVER])
            self._state.wanted[SERVER] = servers
            self._state.moves.aim(table, self._state.members.seats(SERVER), servers, self.plan.shard_bytes)
            self._changed = True

    def _on_join(self, join: Join, now: float) -> None:
        members = self._state.members
        if not members.apply(join, now):
            self.ignored["join of one that is gone"] += 1
        if join.node in members or join.node in members.gone:
            self._tell(join.node)

    def _on_report(self, report: Report) -> None:
        self._let_go(report.node, report.view)
        if report.node not in self._state.members:
            self._tell(report.node)  # It learns from the view that it is out.
            return
        member, table = self._state.members[report.node], self._state.table
        try:
            reported = self._reports.take(
                report.node, report.facts, [] if table is None else table.shards_of(report.node)
            )
        except ProtocolError:
            self.ignored["malformed report"] += 1
            return
        if self._recovery is not None:
            self._recovery.on_report(report.node, report.view, reported)
        if self._final_reports is not None:
            self._final_reports.update(reported)
        if member.role == WORKER and isinstance(reason := report.facts.get("stop"), str):
            self._on_stop(reason)
        if member.role == WORKER and "post" in report.facts:
            self._publish_posts()
        if member.role == WORKER and self._state.deal is not None and type(report.facts.get("dealt")) is int:
            self._state.deal.let_go(member.node, report.facts["dealt"])
        if member.role == WORKER:
            self._hold_back()
        if member.role == WORKER and report.facts.get("done") is True:
            self._on_done(member)
        if self._view is not None and report.view < self._view.number:
            self._tell(report.node)

    def _on_stop(self, reason: str) -> None:
        """The worker that evaluates finds that training may end early: all are told."""
        if "stop" not in self._state.settings:
            self._state.settings["stop"] = reason
            self._changed = True
            self._decide("stop", reason)

    def _publish_posts(self) -> None:
        """Once every worker has posted where the others find it, all are told; from then on they rely on it."""
        if "posts" in self._state.settings:
            return
        posts = {rank: self._reports.post_of(node) for rank, node in self._state.members.seats(WORKER).items()}
        if len(posts) == self._state.wanted[WORKER] and None not in posts.values():
            self._state.settings["posts"] = posts
            self._changed = True

    def _hold_back(self) -> None:
        """The first worker may want all at one border, to save what is there."""
        workers, settings = self._state.members.seats(WORKER), self._state.settings
        if "hold" not in settings and not self._knows_how_far:
            return
        facts = {rank: self._reports.facts.get(node, {}) for rank, node in workers.items()}
        facts |= {rank: {"done": True} for rank in self._state.done_ranks}  # They may have left.
        others: list[Mapping[str, Any]] = [facts.get(r, {}) for r in range(1, self._state.wanted[WORKER])]
        if self._state.deal is not None:  # Whoever has slots is to come, and nobody else.
            others = [self._facts_of_owner(node, given_in) for node, given_in in self._state.deal.gifts]
        border = self._lease_border() if self.plan.leased and self._knows_how_far else None
        hold = next_hold(settings.get("hold"), facts.get(0, {}), others, border, self.plan.borders)
        if hold == settings.get("hold"):
            return
        settings.pop("hold", None)
        if hold is not None:
            settings["hold"] = hold
        self._limit_leases()
        self._changed = True

    def _facts_of_owner(self, node: int, given_in: int) -> Mapping[str, Any]:
        """What who fills a slot last said; nothing where it does not work on this one yet, for then it spoke of
        others. Once one is done so are all slots, and nobody need fill them."""
        if self._state.done_ranks:
            return {"done": True}
        facts = self._reports.facts.get(node, {})
        works_by = facts.get("dealt")
        return facts if type(works_by) is int and works_by >= given_in else {}

    @property
    def _knows_how_far(self) -> bool:
        """Whether it is known how far cells have been handed out; a coordinator that takes over learns it."""
        return self._recovery is None

    def _lease_border(self) -> int:
        """Where all can meet: past every cell that was handed out, and that any shard has."""
        return self._leases.border(self.plan.slots, at_least=self._reports.end)

    def _on_done(self, worker: Member) -> None:
        """A worker says that it has nothing more to do: all is trained, or it was told to leave."""
        if self._may_be_done:
            self._changed |= worker.rank not in self._state.done_ranks
            self._state.done_ranks.add(worker.rank)
        elif self._recovery is not None:
            self._recovery.on_request(worker.node)  # It will not ask any more: it holds nothing.
        else:
            # It cannot be called back. If its seat is wanted again by now, somebody else takes it.
            self._dismiss(worker.node, "it was told to leave")

    def _on_lease_request(self, request: LeaseRequest) -> None:
        node, members = request.node, self._state.members
        if not self.plan.leased or node not in members or members[node].role != WORKER:
            self.ignored["lease for no worker"] += 1
            self._tell(node)
            return
        if self._recovery is not None:
            self._recovery.on_request(node)
            self._early[node] = request
        leaves = members[node].rank >= self._state.wanted[WORKER]
        wanted = 0 if leaves or self.failed is not None else request.wanted
        cells = self._leases.ask(node, wanted=wanted, done=request.done, held=request.held)
        self._leases.loss = request.loss or self._leases.loss
        lease = Lease(
            term=self.term,
            ticket=request.ticket,
            cells=cells,
            committed=self._leases.committed,
            dry=len(cells) < wanted,
            over=leaves or self._leases.complete,
            loss=self._leases.loss,
        )
        self.outbox.append((node, lease))
        if leaves and not cells:
            self._dismiss(node, "the job has fewer workers now")

    def _on_filled(self, sender: int, filled: Filled) -> None:
        table = self._state.table
        if table is None or not 0 <= filled.shard < len(table):
            self.ignored["filled shard that is none"] += 1
        elif table.fill(filled.shard, sender, filled.generation):
            self._changed = True
            self._decide("filled", "its backup has everything", shard=filled.shard)

    def _evict_silent(self, now: float) -> None:
        """Replace members that say nothing. Whoever cannot be replaced is waited for longer."""
        members, table = self._state.members, self._state.table
        silent = {node for node in members if members.silent_for(node, now) > self.plan.silent_after_s}
        if silent == set(members):
            return  # When nobody can be heard, the fault is more likely here.
        if self._is_trained:
            silent &= set(members.seats(SERVER).values())  # Workers may be busy with what comes after.
        for node in sorted(silent):
            seconds = members.silent_for(node, now)
            coverable = table is None or table.can_lose(node, silent)
            if coverable or seconds > self.plan.form_timeout_s:
                member = members[node]
                self._end(member, f"it has said nothing for {seconds:.1f} s")
                self._lose(node, f"it has said nothing for {seconds:.1f} s")

    def _watch_forming(self, now: float) -> None:
        if self._state.table is None and now - self._began_at > self.plan.form_timeout_s:
            there = len(self._state.members.seats(SERVER))
            self._fail(
                f"Only {there} of {self.plan.servers} servers have come within {self.plan.form_timeout_s:g} s; "
                "look at the others' output."
            )

    def _adjust(self, now: float) -> None:
        """Let the policy look at the reports, and carry out what it decides."""
        if self._view is None or self._is_trained:
            return
        workers = self._state.members.seats(WORKER)
        for decision in self._state.adjuster.decide(self._reports, workers, now):
            self._decide(decision.what, decision.why, **decision.numbers)
            self._changed |= bool(decision.settings)
            self._state.settings.update(decision.settings)
            for action, values in decision.controls:
                self._control(action, **values)
            if decision.evict is not None:
                self._end(self._state.members[decision.evict], decision.why)
                self._lose(decision.evict, decision.why)
            if decision.stop:
                self._fail(decision.stop)

    def _control(self, action: str, **values: object) -> None:
        """A decision for every shard; saved, like a view, before it is told."""
        self._state.controls.issue(action, values)
        self._changed = True
