"""A server: one node that holds some shards as primary, others as backup, as the newest view says.

**Why no acknowledged push is lost or applied twice.**
1. One line. Only the coordinator changes a shard's holders; a change is durable before anybody hears of it, and
   gets a higher generation. So the holders form one line of generations, also across coordinators.
2. One writer. In generation g a primary answers when its backup of g has confirmed, or when g has no backup that
   may take over. The next generation's primary is this one or that backup: it has every answered entry.
3. Fence. A backup that knows a newer generation confirms nothing of an older one; until then it keeps what it
   confirms. So a deposed primary that does not know it yet can answer only what its successor has.
4. Filling. The shard stands still between `Fill` and `Filled`; from `Filled` on the primary waits for its
   backup, and only then tells the coordinator, who alone may promote it. Before that the backup counts for
   nothing.
5. Same log, same shard. Both copies take the same entries in the same order with the same code. All that an
   answer depends on (sequences, cells, clocks, rounds) follows from the log, and dropped pushes are in it too.
6. Once. A node's pushes are taken in order without gaps, so "not newer than its last" means "taken already". The
   same data, pushed by another node after a death, is known by its cells.
7. News. Clocks and acknowledgements say only what the backup has too: no worker acts on what may be undone. Nor
   on what it is told in a generation that it does not know yet: it would look for the values in a dead copy.
8. Progress. Whoever waits repeats: pushes, entries, `Fill`, `Filled`, each until it is answered. Repeating is
   harmless by 6, by the log's indices, and because a backup is filled once in a generation.
9. Homes. Where copies lie in one memory, a home is written by one node: the coordinator hands it on when its
   last holder has reported under the view that took it away, or is dead.
10. Together. Where shards close their rounds together, what each has learnt of the others is an entry of its log
    before it is used, so 5 holds; and what it tells them is, as in 7, what its backup has too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from shoal.ps.backup import Backup
from shoal.ps.between_servers import Fill, Filled, PartRequest, Replicate, Replicated, RoundPart
from shoal.ps.contract import ShardValues
from shoal.ps.inheritance import inherit
from shoal.ps.messages import (
    COORDINATOR,
    Control,
    Hello,
    Join,
    PsMessage,
    Pull,
    Push,
    Refused,
    Report,
    ShardView,
    View,
)
from shoal.ps.primary import Primary, Timing
from shoal.ps.rules import ShardRules
from shoal.ps.shard import Shard
from shoal.spec.vocabulary import Role

SHARDS_PER_REPORT = 64
RUNS_PER_REPORT = 512
"""Runs of cells that are told of each shard, from the lowest on, so that a report always fits a packet. Leases
leave few gaps; with a quorum every cell that came late is one for ever, and what is not told is only counted."""


class ServerMachine:
    """A server's part of the protocol. `make_values(shard, copy)` opens the home of a shard's values."""

    def __init__(
        self,
        *,
        node: int,
        number: int,
        address: str,
        rules: ShardRules,
        make_values: Callable[[int, int], ShardValues],
        now: float,
        host: int = 0,
        timing: Timing | None = None,
    ) -> None:
        self.outbox: deque[tuple[int, PsMessage]] = deque()
        self.node = node
        self.number = number
        self.view: View | None = None
        self.held: dict[int, Primary | Backup] = {}
        """By shard: this node's duty."""
        self.facts: dict[str, Any] = {}
        """What to report besides the shards: memory and the like."""
        self.ignored: Counter[str] = Counter()
        """Messages that asked for nothing this node could do, by why."""
        self._early_fills: dict[int, tuple[int, Fill]] = {}
        """By shard: what came before the view that explains it."""
        self._own_post: deque[RoundPart | PartRequest] = deque()
        """What one of this node's shards tells another."""
        self._address = address
        self._host = host
        self._rules = rules
        self._make_values = make_values
        self._timing = timing or Timing()
        self._report_due = now
        self._settle(now)

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        """Take in a message."""
        match message:
            case View():
                self._on_view(message, now)
            case Push() | Hello() | Pull():
                self._on_worker(sender, message, now)
            case Replicate() | Fill():
                self._on_primary(sender, message, now)
            case Replicated() | Filled():
                self._on_backup(sender, message, now)
            case Control():
                self._on_control(sender, message, now)
            case RoundPart() | PartRequest():
                self._on_other_shard(sender, message, now)
            case _:
                self.ignored[f"unexpected {message.kind}"] += 1
        self._settle(now)

    def on_tick(self, now: float) -> None:
        """Report, and repeat what was not answered."""
        if now >= self._report_due:
            self._report(now)
        for duty in self.held.values():
            if isinstance(duty, Primary):
                duty.on_tick(now)
        self._settle(now)

    def primary(self, shard: int) -> Primary | None:
        """This node's duty as primary of a shard, if it has one."""
        duty = self.held.get(shard)
        return duty if isinstance(duty, Primary) else None

    def backup(self, shard: int) -> Backup | None:
        """This node's duty as backup of a shard, if it has one."""
        duty = self.held.get(shard)
        return duty if isinstance(duty, Backup) else None

    def _settle(self, now: float) -> None:
        while self._own_post:
            message = self._own_post.popleft()
            self._on_other_shard(self.node, message, now)
        dues = [duty.due for duty in self.held.values() if isinstance(duty, Primary)]
        self.wakeup = min([self._report_due, *dues])

    def _send(self, node: int, message: PsMessage) -> None:
        if node == self.node and isinstance(message, RoundPart | PartRequest):
            self._own_post.append(message)
        else:
            self.outbox.append((node, message))

    def _on_view(self, view: View, now: float) -> None:
        if self.view is not None and (view.term, view.number) <= (self.view.term, self.view.number):
            return
        is_new_term = self.view is not None and view.term > self.view.term
        before, self.view = self._moving, view
        if self._moving != before or is_new_term:
            self._report_due = now  # The coordinator waits until it is known here, or what is here.
        for shard, holders in enumerate(view.shard_views):
            if holders.primary == self.node:
                self._be_primary(shard, holders, now)
            elif holders.backup == self.node:
                self._be_backup(shard, holders)
            elif self.held.pop(shard, None) is not None:
                # Whatever was logged here and not answered, its senders bring to the new primary. Who is to have
                # this home waits until the coordinator knows that nobody writes here any more.
                self._report_due = now
            if shard in self._early_fills:
                self._on_primary(*self._early_fills.pop(shard), now)

    def _be_primary(self, number: int, holders: ShardView, now: float) -> None:
        assert self.view is not None
        duty = self.held.get(number)
        if not isinstance(duty, Primary):
            shard = self._shard_to_lead(number, holders, duty)
            if shard is None:
                self.ignored["promoted before it was filled"] += 1
                return
            duty = self.held[number] = Primary(number, shard, self._send, self._timing)
        duty.is_moving = number in self._moving
        duty.adopt(holders, self.view.workers, [shard.primary for shard in self.view.shard_views], now)

    def _shard_to_lead(self, number: int, holders: ShardView, duty: Backup | None) -> Shard | None:
        """A new primary's shard: what it was filled with as backup, or what lies in the home that it is given."""
        if duty is not None and duty.copy == holders.copy:
            return duty.shard
        values = self._make_values(number, holders.copy)
        return inherit(number, self._rules, values) if duty is None or values.journal is not None else duty.shard

    def _be_backup(self, number: int, holders: ShardView) -> None:
        duty, is_moving = self.backup(number), number in self._moving
        if duty is not None and duty.holders.generation == holders.generation:
            duty.holders = holders
            duty.note_moving(is_moving)
            return
        # Filled before anything was sent: only the first copies are, for all of them begin with the same values.
        shard = Shard(self._rules, self._copy_of(number, holders)) if holders.filled else None
        duty = self.held[number] = Backup(
            number, holders, shard, self._rules, lambda: self._copy_of(number, holders), self._send
        )
        duty.note_moving(is_moving)

    @property
    def _moving(self) -> Sequence[int]:
        """The shards that are about to change hands."""
        return () if self.view is None else self.view.settings.get("moving", ())

    def _copy_of(self, number: int, holders: ShardView) -> ShardValues:
        """Values in the home beside the primary's."""
        values = self._make_values(number, 1 - holders.copy)
        if values.journal is not None:
            values.journal.give_up()  # Its primary keeps one, as long as this is no copy.
        values.initialise()
        return values

    def _on_worker(self, sender: int, message: Push | Hello | Pull, now: float) -> None:
        duty = self.primary(message.shard)
        if duty is None or message.generation != duty.holders.generation:
            if isinstance(message, Push):
                self._refuse(sender, message)
            if message.generation > self._generation(message.shard):
                self._report_due = now  # There is a newer view than mine; the answer to a report is that view.
            return
        match message:
            case Push():
                duty.on_push(sender, message, now)
            case Hello():
                duty.on_hello(sender, message)
            case Pull():
                duty.on_pull(sender, message)

    def _refuse(self, sender: int, push: Push) -> None:
        known = self._generation(push.shard)
        self._send(sender, Refused(shard=push.shard, generation=known, sequence=push.sequence))

    def _on_primary(self, sender: int, message: Replicate | Fill, now: float) -> None:
        duty = self.backup(message.shard)
        if isinstance(message, Fill) and message.generation > self._generation(message.shard):
            # The primary has heard of this node's duty sooner than the node itself.
            self._early_fills[message.shard] = (sender, message)
            self._report_due = now
        elif duty is None or (sender, message.generation) != (duty.holders.primary, duty.holders.generation):
            self.ignored["fenced"] += 1
        elif isinstance(message, Fill):
            duty.on_fill(message)
        else:
            duty.on_replicate(message)

    def _on_backup(self, sender: int, message: Replicated | Filled, now: float) -> None:
        duty = self.primary(message.shard)
        if duty is None or (sender, message.generation) != (duty.holders.backup, duty.holders.generation):
            self.ignored["fenced"] += 1
        elif isinstance(message, Filled):
            duty.on_filled(message.index, now)
        else:
            duty.on_replicated(message.index, now)

    def _on_other_shard(self, sender: int, message: RoundPart | PartRequest, now: float) -> None:
        # No fence: whoever tells a part, it is the same; and a request changes nothing.
        duty = self.primary(message.shard)
        if duty is None:
            self.ignored["fenced"] += 1
        elif isinstance(message, RoundPart):
            duty.on_part(message, now)
        else:
            duty.on_part_request(sender, message, now)

    def _on_control(self, sender: int, control: Control, now: float) -> None:
        duty = self.primary(control.shard)
        if duty is None or self.view is None or control.term < self.view.term:
            self.ignored["fenced"] += 1
        else:
            duty.on_control(sender, control, now)

    def _generation(self, shard: int) -> int:
        """The newest generation of a shard that this node knows."""
        if self.view is None or not 0 <= shard < len(self.view.shards):
            return -1
        return self.view.shard_views[shard].generation

    def _report(self, now: float) -> None:
        self._report_due = now + self._timing.report_every_s
        if self.view is None or self.node not in self.view.addresses:
            join = Join(node=self.node, role=Role.SERVER, rank=self.number, address=self._address, host=self._host)
            self._send(COORDINATOR, join)
            if self.view is None:
                return
        primaries = [(number, duty) for number, duty in self.held.items() if isinstance(duty, Primary)]
        for first in range(0, max(1, len(primaries)), SHARDS_PER_REPORT):
            shards = {number: _facts(duty) for number, duty in primaries[first : first + SHARDS_PER_REPORT]}
            report = Report(
                node=self.node,
                role=Role.SERVER,
                rank=self.number,
                view=self.view.number,
                facts={**self.facts, "shards": shards},
            )
            self._send(COORDINATOR, report)


def _facts(duty: Primary) -> dict[str, Any]:
    shard, safe = duty.shard, duty.safe_cells()
    return {
        "generation": duty.holders.generation,
        "version": shard.version,
        "floor": shard.floor,
        "rounds": shard.rounds,
        "cells": safe.first_runs(RUNS_PER_REPORT).to_plain(),
        "num_cells": len(safe),
        "loss": shard.loss,
        "delay_mean": shard.delay_mean,
        "delay_max": shard.delay_max,
        "tally": dict(shard.tally),
        "queue": duty.queued,
    }
