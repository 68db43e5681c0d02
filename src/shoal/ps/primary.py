"""The primary's duties for one shard: log, replicate, apply, and answer when the backup has it too."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.ledger.cells import CellSet
from shoal.ps.between_servers import Filled, PartRequest, Replicate, RoundPart, Settle
from shoal.ps.inheritance import note_books, note_entry
from shoal.ps.link import AnswerPatience, size_of
from shoal.ps.messages import (
    COORDINATOR,
    NOBODY,
    Control,
    Controlled,
    Hello,
    PsMessage,
    Pull,
    Push,
    PushOutcome,
    Refused,
    ShardView,
)
from shoal.ps.news import News
from shoal.ps.packing import pack
from shoal.ps.ring import WorkerRing
from shoal.ps.rules import Together
from shoal.ps.scatter import Scatter
from shoal.ps.settlement import AllToAll, Settling
from shoal.ps.shard import PushVerdict, Shard

Send = Callable[[int, PsMessage], None]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long members wait for an answer before they say it again."""

    patience_s: float = 0.5
    fill_patience_s: float = 5.0
    """The same for the bulk of a whole shard."""
    report_every_s: float = 0.25


class Backing(Enum):
    """What the primary knows of its backup."""

    ALONE = auto()
    """There is none: what is applied is safe as far as it can be."""
    FILLING = auto()
    """It is being filled. Nothing is applied meanwhile, and nobody may promote it."""
    SYNCED = auto()
    """It has everything and gets every entry: nothing is answered before it has said so."""


@dataclass(kw_only=True)
class LogEntry:
    """What the backup has not confirmed yet, and what to tell whom once it has."""

    message: Replicate
    cells: list[int] = field(default_factory=list)
    """What it put into the values."""
    replies: list[tuple[int, PsMessage]] = field(default_factory=list)


_SETTLING: dict[Together | None, Callable[..., Settling]] = {Together.RING: WorkerRing, Together.CHANGES: Scatter}


class Primary:
    """One shard at its primary, through all generations in which it stays there."""

    MAX_QUEUED = 1024
    """Pushes that are kept while a backup is filled; others are not answered, and so come again."""

    def __init__(self, number: int, shard: Shard, send: Send, timing: Timing) -> None:
        self.number = number
        self.shard = shard
        self.backing = Backing.ALONE
        self.holders = ShardView(generation=NOBODY, primary=NOBODY)
        self.workers: Mapping[int, int] = {}
        self.ignored: Counter[str] = Counter()
        self._send = send
        self._timing = timing
        self._log: deque[LogEntry] = deque()
        self._queue: dict[tuple[int, int], tuple[int, Push | Control]] = {}
        self._due = float("inf")
        self._patience = AnswerPatience(timing.patience_s)
        self._filling = AnswerPatience(timing.fill_patience_s)
        """With the backup: about what is logged, and about all of a shard."""
        self._fill_bytes = 0
        self._news = News(number, shard)
        kind = _SETTLING.get(shard.rules.together, AllToAll)
        self._settlement: Settling = kind(number, shard, self._reply, timing.patience_s)
        self.is_moving = False
        """It is about to change hands: whoever has all of it keeps a journal."""
        self._keeps_journal = False

    @property
    def due(self) -> float:
        """When something unanswered is to be repeated."""
        return min(self._due, self._settlement.due)

    @property
    def queued(self) -> int:
        """Pushes that wait: for a backup's confirmation, or until it is filled."""
        return len(self._log) + len(self._queue)

    def safe_cells(self) -> CellSet:
        """The cells that stay whoever dies next: those that the backup has too."""
        safe = self.shard.cells.copy()
        for entry in self._log:
            for cell in entry.cells:
                safe.remove(cell)
        return safe

    def adopt(self, holders: ShardView, workers: Mapping[int, int], primaries: Sequence[int], now: float) -> None:
        """Go on under a newer view, in which this node is (still) the primary; `primaries` are all shards'."""
        self.workers = workers
        self._settlement.primaries = primaries
        changed = holders.generation != self.holders.generation
        self.holders = holders
        if not changed:
            self._keep_journal()
            self._schedule(now)
            return
        if holders.backup == NOBODY:
            self.backing = Backing.ALONE
        else:
            # A new holder has nothing, except at the very beginning, when all have the same.
            self.backing = Backing.SYNCED if holders.filled and not self.shard.index else Backing.FILLING
        self._keep_journal()
        self._patience.begin_anew()
        self._filling.begin_anew()
        # By the coordinator's decision nobody else can take over what was logged before, so nobody is waited for.
        self._confirm_up_to(self.shard.index)
        self._repeat(now)
        if self.backing is Backing.ALONE:
            self._work_off(now)
        self._settle(now)
        self._settlement.repeat(now)
        # News may have been lost with the primary before, or with a message.
        for node in workers.values():
            self._send(node, self._news.clocks(self.holders.generation))

    def on_push(self, sender: int, push: Push, now: float) -> None:
        """Log and apply a push, once; it is answered when it is safe."""
        if self._postponed(sender, push, (push.origin, push.sequence)):
            return
        match self.shard.judge(push):
            case PushVerdict.NEW:
                self._log_and_apply(sender, push, now)
                self._settle(now)
            case PushVerdict.KNOWN:
                self._reply(
                    sender, self._news.ack(self.holders.generation, push, self.shard.outcome_of_known(push))
                )
            case PushVerdict.EARLY:
                self._send(sender, Refused(shard=self.number, generation=push.generation, sequence=push.sequence))
            case PushVerdict.MALFORMED:
                self.ignored["malformed push"] += 1

    def on_control(self, sender: int, control: Control, now: float) -> None:
        """Log and obey a decision of the coordinator, once."""
        if self._postponed(sender, control, (sender, control.number)):
            return
        if control.number > self.shard.control:
            self._log_and_apply(sender, control, now)
        else:
            self._reply(sender, Controlled(shard=self.number, number=control.number))

    def on_part(self, part: RoundPart, now: float) -> None:
        """Another shard tells its part of a round."""
        self._settlement.on_part(part)
        self._settle(now)

    def on_part_request(self, sender: int, request: PartRequest, now: float) -> None:
        """Another shard misses this one's part of a round."""
        self._settlement.on_request(sender, request)
        self._settle(now)

    def on_hello(self, sender: int, hello: Hello) -> None:
        """Say how far the shard is, as far as it is safe."""
        self._reply(sender, self._news.clocks(self.holders.generation))

    def on_pull(self, sender: int, pull: Pull) -> None:
        """Send the values as they are; what is not safe yet and gets lost only makes the reader a little ahead."""
        for values in self._news.values(self.holders.generation, pull):
            self._send(sender, values)

    def on_replicated(self, index: int, now: float) -> None:
        """The backup has everything up to here."""
        if self.backing is Backing.SYNCED and self._log and self._log[0].message.index <= index:
            self._confirm_up_to(index)
            self._patience.answer(now, is_last=not self._log)
            self._schedule(now)

    def on_filled(self, index: int, now: float) -> None:
        """The new backup has everything: from here on it is waited for, and only now is that told."""
        if self.backing is not Backing.FILLING or index != self.shard.index:
            return
        self.backing = Backing.SYNCED
        self._filling.answer(now)
        self._repeat(now)
        self._work_off(now)
        self._settle(now)

    def on_tick(self, now: float) -> None:
        """Repeat what was not answered."""
        if now >= self._due:
            (self._filling if self.backing is Backing.FILLING else self._patience).note_vain()
            self._repeat(now)
        if now >= self._settlement.due:
            self._settle(now)
        if now >= self._settlement.due:
            self._settlement.repeat(now)

    def _keep_journal(self) -> None:
        """Keep one as long as nobody else has everything, as far as the coordinator knows."""
        is_needed = self.backing is not Backing.SYNCED or not self.holders.filled or self.is_moving
        if is_needed and not self._keeps_journal:
            note_books(self.shard)
        elif not is_needed and self.shard.values.journal is not None:
            self.shard.values.journal.give_up()
        self._keeps_journal = is_needed

    def _postponed(self, sender: int, message: Push | Control, key: tuple[int, int]) -> bool:
        """Whether the message waits until the backup is filled: so long the shard stands still."""
        if self.backing is not Backing.FILLING:
            return False
        if len(self._queue) < self.MAX_QUEUED:
            self._queue[key] = (sender, message)
        else:
            self.ignored["queue full"] += 1
        return True

    def _work_off(self, now: float) -> None:
        queue, self._queue = self._queue, {}
        for sender, message in queue.values():
            if isinstance(message, Push):
                self.on_push(sender, message, now)
            else:
                self.on_control(sender, message, now)

    def _settle(self, now: float) -> None:
        """Close the open round, if all shards close theirs together and all that it takes is here."""
        if not self.shard.rules.together or self.backing is Backing.FILLING:
            return
        entry = self._settlement.close(now)
        if entry is not None:
            self._log_and_apply(NOBODY, entry, now)

    def _log_and_apply(self, sender: int, entry: Push | Control | Settle, now: float) -> None:
        if self.backing is Backing.SYNCED:
            # Sent before it is applied: both copies work at the same time.
            self._replicate(entry)
            if len(self._log) == 1:
                self._schedule(now)
        progress = self._progress()
        note_entry(self.shard, entry)
        outcome = self.shard.accept(entry)
        if isinstance(entry, Push):
            assert outcome is not None
            if self._log and outcome is PushOutcome.APPLIED:
                self._log[-1].cells = entry.cells
            self._reply(sender, self._news.ack(self.holders.generation, entry, outcome))
        elif isinstance(entry, Control):
            self._reply(sender, Controlled(shard=self.number, number=entry.number))
        if self.shard.rules.consistency.waits and self._progress() != progress:
            for node in self.workers.values():
                if node != sender:
                    self._reply(node, self._news.clocks(self.holders.generation, whole=False))

    def _replicate(self, entry: Push | Control | Settle) -> None:
        packed = pack(entry)
        message = Replicate(
            shard=self.number,
            generation=self.holders.generation,
            index=self.shard.index + 1,
            entry={"kind": packed.kind, "fields": packed.fields},
            frames=tuple(packed.frames),
        )
        self._log.append(LogEntry(message=message))
        self._send(self.holders.backup, message)

    def _reply(self, node: int, message: PsMessage) -> None:
        """Send what the shard's present state says, once that state is safe."""
        if self._log:
            self._log[-1].replies.append((node, message))
        else:
            self._send(node, message)

    def _confirm_up_to(self, index: int) -> None:
        while self._log and self._log[0].message.index <= index:
            for node, reply in self._log.popleft().replies:
                self._send(node, reply)

    def _repeat(self, now: float) -> None:
        if self.backing is Backing.FILLING:
            fill = self._news.fill(self.holders.generation)
            self._fill_bytes = size_of(fill)
            self._send(self.holders.backup, fill)
        elif self.backing is Backing.SYNCED:
            for entry in self._log:
                self._send(self.holders.backup, entry.message)
            if not self.holders.filled:
                told = Filled(shard=self.number, generation=self.holders.generation, index=self.shard.index)
                self._send(COORDINATOR, told)
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        if self.backing is Backing.FILLING:
            self._due = self._filling.begin(now, self._fill_bytes)
        elif self.backing is Backing.SYNCED and self._log:
            self._due = self._patience.begin(now, sum(size_of(entry.message) for entry in self._log))
        elif self.backing is Backing.SYNCED and not self.holders.filled:
            self._due = now + self._timing.patience_s
        else:
            self._due = float("inf")

    def _progress(self) -> tuple[int, int]:
        return self.shard.floor, self.shard.rounds
