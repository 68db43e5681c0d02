"""A worker's protocol: where the shards are, what was pushed and not yet acknowledged, who may go on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

from shoal.comm.codec import Frame
from shoal.ps.consistency import Consistency
from shoal.ps.dealing import SlotHolder
from shoal.ps.leasing import LeaseHolder
from shoal.ps.link import AnswerPatience, Offer, Offers, ShardLink, size_of
from shoal.ps.messages import (
    COORDINATOR,
    Ack,
    Clocks,
    Join,
    Lease,
    PsMessage,
    PushOutcome,
    Refused,
    Report,
    Values,
    View,
)
from shoal.ps.primary import Timing
from shoal.spec.vocabulary import Role


class WorkerMachine:
    """A worker's part of the protocol; its driver asks `may_start`, computes, and calls `push`."""

    def __init__(
        self,
        *,
        node: int,
        rank: int,
        num_shards: int,
        consistency: Consistency,
        now: float,
        address: str = "",
        leases: LeaseHolder | None = None,
        slots: SlotHolder | None = None,
        timing: Timing | None = None,
        first_shard: int = 0,
        bulk: int = 0,
    ) -> None:
        """`bulk`: bytes of all shards' values, where they travel as frames."""
        self.outbox: deque[tuple[int, PsMessage]] = deque()
        self.node = node
        self.rank = rank
        self.consistency = consistency
        self.leases = leases
        """The cells it is given, where they are leased."""
        self.slots = slots
        """The slots it fills, where they are dealt."""
        self.view: View | None = None
        self._timing = timing or Timing()
        self.links = [ShardLink(patience=AnswerPatience(self._timing.patience_s)) for _ in range(num_shards)]
        """Its own shards, `first_shard` of the job and those that follow; numbers here count from there."""
        self._first_shard = first_shard
        self.outcomes: Counter[str] = Counter()
        """Acknowledgements by outcome."""
        self.facts: dict[str, Any] = {}
        """What to report."""
        self.ignored: Counter[str] = Counter()
        self._address = address
        self._bulk = bulk
        self._open_bytes = 0
        """Of pushes that are not acknowledged."""
        self._offers = Offers(num_shards)
        self._was_in = False
        self._report_due = now
        self._settle()

    @property
    def is_ready(self) -> bool:
        """Whether it is known where every shard is, and how far."""
        return all(link.known for link in self.links)

    @property
    def is_dismissed(self) -> bool:
        """Whether another node has this rank now."""
        return self.view is not None and self.view.workers.get(self.rank, self.node) != self.node

    @property
    def is_out(self) -> bool:
        """Whether it was a member and is none any more: it has nothing left to do."""
        return self._was_in and self.view is not None and self.node not in self.view.addresses

    def completed(self, clock_of: int | None = None) -> int:
        """The clock that every shard has of a slot, or of this rank: whoever follows another goes on after it."""
        whose = self.rank if clock_of is None else clock_of
        return min(link.clocks.get(whose, 0) for link in self.links)

    @property
    def reached(self) -> int:
        """The last clock that any shard has of this rank, or of one of its slots, or that was begun here."""
        whose = [self.rank] if self.slots is None else self.slots.held
        begun = 0 if self.slots is None else self.slots.last_begun
        return max([begun, *(link.clocks.get(each, 0) for link in self.links for each in whose)])

    @property
    def versions(self) -> list[int]:
        """The newest version of each shard that is known here."""
        return [link.version for link in self.links]

    @property
    def slowest(self) -> ShardLink:
        """The shard that tells of the last round that every shard closed."""
        return min(self.links, key=lambda link: link.rounds)

    @property
    def rounds_loss(self) -> float:
        """The mean loss of that round."""
        return self.slowest.loss

    @property
    def rounds_loss_parts(self) -> list[float]:
        """The means of the numbers that the loss is told with; none where not all have told them."""
        return self.slowest.loss_parts

    @property
    def outstanding(self) -> int:
        """Pushes that not every shard has acknowledged."""
        return len(self._offers)

    def is_released(self, sequence: int) -> bool:
        """Whether every shard has acknowledged this push: its memory may be used again."""
        return sequence not in self._offers

    def may_start(self, clock: int, shard: int | None = None) -> bool:
        """Whether consistency lets this worker begin its step `clock`: on all shards, or read one of them."""
        links = self.links if shard is None else [self.links[shard]]
        return self.is_ready and self.consistency.may_start(
            clock, floor=min(link.floor for link in links), rounds=min(link.rounds for link in links)
        )

    def push(self, offer: Offer, *, based_on: Sequence[int], frames: Sequence[Sequence[Frame]], now: float) -> int:
        """Push a gradient: `based_on` and `frames` by shard. Returns the sequence that names it."""
        sequence = self.open_push(offer)
        for shard in range(len(self.links)):
            self.push_shard(sequence, shard, based_on=based_on[shard], frames=frames[shard], now=now)
        return sequence

    def open_push(self, offer: Offer) -> int:
        """Name a push whose shards follow one by one, as their gradients are complete."""
        return self._offers.open(offer)

    def push_shard(self, sequence: int, shard: int, *, based_on: int, frames: Sequence[Frame], now: float) -> None:
        """Push one shard's part of an open push."""
        link = self.links[shard]
        push = self._offers[sequence].for_shard(
            self._first_shard + shard,
            origin=self.node,
            sequence=sequence,
            generation=link.holders.generation if link.holders else 0,
            based_on=based_on,
            frames=frames,
        )
        self._offers.note_sent(sequence, shard)
        self._open_bytes += size_of(push)
        if not link.unacked:
            link.due = link.patience.begin(now, self._bytes_ahead)
        link.unacked[sequence] = push
        self._send_to(link, push)
        self._settle()

    def unsent(self, sequence: int) -> Collection[int]:
        """The shards that an open push has not gone to yet."""
        return self._offers.unsent(sequence)

    def pull(self, shard: int, now: float, *, whole: bool = False) -> int:
        """Ask for a shard's values, or for all of it; `pulled` gives them when they are there."""
        link = self.links[shard]
        link.ticket += 1
        link.wants_whole = whole
        link.parts = {}
        link.due = link.patience.begin(now, self._bytes_ahead)
        self._send_to(link, link.pull(self._first_shard + shard))
        self._settle()
        return link.ticket

    def pulled(self, shard: int) -> list[Values] | None:
        """The parts of the shard's values that were asked for last, in order; None until all have come."""
        return self.links[shard].pulled

    def say_done(self, now: float) -> None:
        """Tell the coordinator that this rank has trained on all that was its own."""
        self.facts["done"] = True
        self._report(now)

    @property
    def is_dealt(self) -> bool:
        """Whether it works on the slots that are its own, and knows how far every shard has each of them."""
        assert self.slots is not None
        return not self.slots.is_behind and all(link.is_current for link in self.links)

    def follow_deal(self, now: float) -> bool:
        """Between two steps: take over and let go of slots, as far as that can be now; whether that is all."""
        assert self.slots is not None
        if self.slots.is_behind and not self.outstanding:
            self.facts["dealt"] = self.slots.adopt()
            self.facts.pop("held", None)  # How far it is was said of other slots.
            for link in self.links:
                link.is_current = False
            self.ask_how_far(now)
            self.report_now(now)
        return self.is_dealt

    def report_now(self, now: float) -> None:
        """Tell the coordinator at once what there is to report."""
        self._report_due = now
        self._settle()

    def ask_how_far(self, now: float) -> None:
        """Ask every shard how far it is."""
        for shard in range(len(self.links)):
            self._ask(shard, now)
        self._settle()

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        """Take in a message."""
        match message:
            case View():
                self._on_view(message, now)
            case Lease():
                if self.leases is not None:
                    self.leases.on_lease(message, now)
            case Ack() | Clocks() | Refused() | Values() if self._is_own(message.shard):
                self._on_shard(message, now)
            case _:
                self.ignored[f"unexpected {message.kind}"] += 1
        self._settle()

    def on_tick(self, now: float) -> None:
        """Report, and repeat what was not answered."""
        if now >= self._report_due:
            self._report(now)
        for shard, link in enumerate(self.links):
            if now >= link.due:
                if link.is_awaited:
                    link.patience.note_vain()
                self._ask(shard, now)
        if self.leases is not None and self.view is not None and now >= self.leases.due:
            loss = [self.facts["loss"]] if "loss" in self.facts else []
            self.outbox.append((COORDINATOR, self.leases.request(self.node, self.rank, now, loss)))
        self._settle()

    @property
    def _bytes_ahead(self) -> int:
        """What may be on its way before an answer comes: all shards are pushed, or pulled, in one go."""
        return self._open_bytes + self._bulk

    def _is_own(self, shard: int) -> bool:
        return 0 <= shard - self._first_shard < len(self.links)

    def _settle(self) -> None:
        dues = [link.due for link in self.links if link.holders is not None]
        if self.leases is not None and self.view is not None:
            dues.append(self.leases.due)
        self.wakeup = min([self._report_due, *dues])

    def _on_view(self, view: View, now: float) -> None:
        if self.view is not None and (view.term, view.number) <= (self.view.term, self.view.number):
            return
        if self.leases is not None and (self.view is None or view.term > self.view.term):
            self.leases.on_term(view.term, now)
            self._report_due = now
        if self.leases is not None and self.view is not None and "hold" in self.view.settings:
            self.leases.due = min(self.leases.due, now)  # What was held back may be had again.
        self.view = view
        self._was_in |= self.node in view.addresses
        if self.slots is not None:
            self.slots.on_view(view)
        if isinstance(bound := view.settings.get("bound"), int):
            self.consistency = self.consistency.with_bound(bound)
        own = view.shard_views[self._first_shard :]
        for shard, (link, holders) in enumerate(zip(self.links, own, strict=False)):
            changed = link.holders is None or link.holders.generation != holders.generation
            link.holders = holders
            if changed:
                link.patience.begin_anew()
                self._ask(shard, now)

    def _on_shard(self, message: Ack | Clocks | Refused | Values, now: float) -> None:
        link = self.links[message.shard - self._first_shard]
        match message:
            case Ack() | Clocks() if not link.knows(message.generation):
                # Who is told how far a shard is reads it, and would look where it was before. The view is on its
                # way, and with it this worker asks again.
                self._report_due = now
            case Ack():
                self._on_ack(link, message, now)
            case Clocks():
                if message.clocks:
                    link.known = link.is_current = True
                for whose, clock in message.clocks.items():
                    link.clocks[whose] = max(link.clocks.get(whose, 0), clock)
                link.seen = max(link.seen, message.seen)
                link.advance(message)
            case Values(ticket=ticket) if ticket == link.ticket:
                link.take_part(message)
                link.due = link.patience.answer(now, is_last=not link.is_awaited)
            case Refused(generation=generation) if link.holders and generation > link.holders.generation:
                self._report_due = now
            case Refused() if message.sequence in link.unacked:
                # The server is behind, or misses an earlier push: all of them again, soon.
                link.due = min(link.due, now + self._timing.patience_s / 4)

    def _on_ack(self, link: ShardLink, ack: Ack, now: float) -> None:
        link.advance(ack)
        push = link.unacked.pop(ack.sequence, None)
        if push is None:
            return
        self._open_bytes -= size_of(push)
        link.due = link.patience.answer(now, is_last=not link.is_awaited)
        self.outcomes[ack.outcome] += 1
        if ack.outcome == PushOutcome.OVERLAP:
            self._offers.note_overlap(ack.sequence)
        if self._offers.unsent(ack.sequence) or any(ack.sequence in other.unacked for other in self.links):
            return
        cells, overlaps = self._offers.close(ack.sequence)
        if self.leases is not None and overlaps:
            self.leases.set_apart(cells)
        elif self.leases is not None:
            self.leases.finish(cells, now)

    def _ask(self, shard: int, now: float) -> None:
        """Say again to the shard's primary whatever it has not answered; else ask it how far it is."""
        link = self.links[shard]
        link.due = now + self._timing.patience_s
        if link.is_awaited:
            link.due = link.patience.begin(now, self._bytes_ahead)
        for message in link.unanswered(self._first_shard + shard):
            self._send_to(link, message)

    def _send_to(self, link: ShardLink, message: PsMessage) -> None:
        if link.holders is not None:
            self.outbox.append((link.holders.primary, message))

    def _report(self, now: float) -> None:
        self._report_due = now + self._timing.report_every_s
        if self.view is None or self.node not in self.view.addresses:
            join = Join(node=self.node, role=Role.WORKER, rank=self.rank, address=self._address)
            self.outbox.append((COORDINATOR, join))
        if self.view is not None:
            seen, facts = self.view.number, dict(self.facts)
            report = Report(node=self.node, role=Role.WORKER, rank=self.rank, view=seen, facts=facts)
            self.outbox.append((COORDINATOR, report))
