"""One shard as a replicated state machine: the same log makes the same shard, bit for bit, on every copy."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch

from shoal.comm.codec import Frame, Message
from shoal.errors import ProtocolError
from shoal.ledger.cells import CellSet
from shoal.ps.between_servers import Settle
from shoal.ps.contract import ShardValues
from shoal.ps.messages import Control, Push, PushOutcome
from shoal.ps.packing import pack, unpack
from shoal.ps.rules import ShardRules, Together


class PushVerdict(Enum):
    """What a shard thinks of a push before it is logged."""

    NEW = auto()
    """It goes into the log, whatever comes of it there."""
    KNOWN = auto()
    """It is in the log already: acknowledge it again."""
    EARLY = auto()
    """An earlier one of its sender, or the end of the round before, must come first: its sender repeats it."""
    MALFORMED = auto()
    """No honest worker sends this."""


class Shard:
    """Values and books of one shard. `accept` takes the log's entries one after the other, and nothing else."""

    def __init__(self, rules: ShardRules, values: ShardValues) -> None:
        self.rules = rules
        self.values = values
        self.index = 0
        """Entries of the log that are in."""
        self.version = 0
        """Updates of the values."""
        self.rounds = rules.start
        """The last clock that was gathered and applied."""
        self.members = set(rules.counted)
        self.clocks = dict.fromkeys(self.members, rules.start)
        """How far each slot, or each rank where cells are leased, has come."""
        self.sequences: dict[int, int] = {}
        """The last push of each node; its pushes are taken in their order, without gaps."""
        self.cells = CellSet(below=rules.start * rules.slots)
        """The cells that are in the values."""
        self.open_round: list[Push] = []
        self.closed: Settle | None = None
        """What closed the last round, where all shards close theirs together."""
        self.lr_scale = 1.0
        self.control = 0
        """The number of the last control."""
        self.loss = 0.0
        """The mean loss of the last update."""
        self.half: list[float] = []
        """Of the last gathered round: what its workers knew of the loss scale, and the sum of what they found."""
        self.found: list[float] = []
        self.loss_parts: list[float] = []
        """Of the last gathered round: the means of what the loss is told with, where that is known."""
        self.tally: Counter[str] = Counter()
        """Pushes by outcome, and the `cells` that went into the values."""
        self.delay_sum = 0
        self.delay_max = 0
        self._needed = rules.consistency.needed(len(rules.own_slots or range(rules.slots)))

    @property
    def floor(self) -> int:
        """The smallest clock that all have completed."""
        return min((self.clocks[rank] for rank in self.members), default=self.rules.start)

    @property
    def delay_mean(self) -> float:
        """By how many updates gradients were late."""
        return self.delay_sum / max(1, self.tally[PushOutcome.APPLIED.value])

    @property
    def next_round(self) -> int:
        """The clock that is gathered next; 0 where none ever is."""
        return self.rules.consistency.next_gathered(self.rounds) or 0

    @property
    def is_complete(self) -> bool:
        """Whether enough of the open round is here to close it."""
        slots = {cell % self.rules.slots for push in self.open_round for cell in push.cells}
        return bool(slots) and len(slots) >= self._needed

    def judge(self, push: Push) -> PushVerdict:
        """Whether the push may be logged now."""
        last = self.sequences.get(push.origin, 0)
        if push.sequence <= last:
            return PushVerdict.KNOWN
        consistency = self.rules.consistency
        clocks = {cell // (self.rules.slots * self.rules.every) + 1 for cell in push.cells}
        if (consistency.gathers(push.clock) and clocks != {push.clock}) or any(cell < 0 for cell in push.cells):
            return PushVerdict.MALFORMED
        if push.sequence > last + 1 or (0 < self.next_round < push.clock):
            return PushVerdict.EARLY
        return PushVerdict.NEW if not push.cells or self.values.fits(push) else PushVerdict.MALFORMED

    def outcome_of_known(self, push: Push) -> PushOutcome:
        """What to say to a push that comes again."""
        fresh = self._outcome(push)
        return PushOutcome.DUPLICATE if fresh is PushOutcome.APPLIED else fresh

    def accept(self, entry: Push | Control | Settle) -> PushOutcome | None:
        """Take the log's next entry; what became of it, where it is a push."""
        self.index += 1
        if isinstance(entry, Control):
            self._obey(entry)
            return None
        if isinstance(entry, Settle):
            self._settle(entry)
            return None
        if not entry.cells:  # A step without data: it only says how far its rank is.
            self.sequences[entry.origin] = entry.sequence
            self.clocks[entry.clock_of] = max(self.clocks.get(entry.clock_of, 0), entry.clock)
            return PushOutcome.APPLIED
        outcome = self._outcome(entry)
        self.tally[outcome.value] += 1
        self.sequences[entry.origin] = entry.sequence
        if outcome is not PushOutcome.OVERLAP:
            self.clocks[entry.clock_of] = max(self.clocks.get(entry.clock_of, 0), entry.clock)
        if outcome is PushOutcome.APPLIED:
            self._take(entry)
        return outcome

    def _outcome(self, push: Push) -> PushOutcome:
        gathered = {cell for other in self.open_round for cell in other.cells}
        known = sum(cell in self.cells or cell in gathered for cell in push.cells)
        if known == len(push.cells):
            return PushOutcome.DUPLICATE
        if self.rules.consistency.gathers(push.clock) and (push.clock <= self.rounds or self.is_complete):
            return PushOutcome.LATE
        return PushOutcome.OVERLAP if known else PushOutcome.APPLIED

    def _take(self, push: Push) -> None:
        delay = max(0, self.version - push.based_on)
        self.delay_sum += delay
        self.delay_max = max(self.delay_max, delay)
        if not self.rules.consistency.gathers(push.clock):
            self._update([push], gathered=False)
            return
        self.open_round.append(push)
        if self.is_complete and not self.rules.together:
            self._close(push.clock, self.in_order())

    def _settle(self, entry: Settle) -> None:
        if self.rules.together is Together.CHANGES:
            self._take_change(entry)
            return
        kept, summed = entry.frames[: entry.kept_frames], entry.frames[entry.kept_frames :]
        self.closed = replace(entry, total={}, frames=kept)
        pushes = self.in_order()
        if entry.total:
            pushes = [replace(pushes[0], frames=summed, **entry.total)]
        self._close(entry.round, pushes, entry.factor)

    def _take_change(self, entry: Settle) -> None:
        cells, steps_before = entry.total["cells"], len(self.cells) // self.rules.slots
        self.tally["cells"] += len(cells)
        for cell in cells:
            self.cells.add(cell)
        self.version += 1
        steps = len(self.cells) // self.rules.slots - steps_before
        self.values.add(entry.frames, loss=self.loss, steps=steps)

    def _close(self, number: int, pushes: Sequence[Push], factor: float = 1.0) -> None:
        self.open_round = []
        self._update(pushes, gathered=True, factor=factor)
        self.rounds = number
        self.half, self.found = pushes[0].half, sum_by_position(push.found for push in pushes)
        weight = sum(push.weight for push in pushes)
        # What a push does not tell is known of none: the shortest list counts.
        parts = sum_by_position(push.loss_parts for push in pushes if push.weight)
        self.loss_parts = [part / weight for part in parts]

    def in_order(self) -> list[Push]:
        """The pushes of the open round, in the order of their slots."""
        return sorted(self.open_round, key=lambda push: min(push.cells))

    def usable(self, pushes: Sequence[Push]) -> Sequence[Push]:
        """Those of a round that are applied: one that is no number is left out, or all where all are needed."""
        sound = [push for push in pushes if not push.is_spoilt]
        return sound if len(sound) == len(pushes) or not self.rules.consistency.needs_all else []

    def scale_of(self, pushes: Sequence[Push]) -> float:
        """What the sum of these gradients is to be multiplied by to become a mean."""
        # Multiplied by the reciprocal, as in the arena: a division would round otherwise. Loss scales are powers
        # of two, so `push.scale` rounds nothing.
        weight = 1.0 if all(push.scaled for push in pushes) else sum(push.weight for push in pushes)
        return pushes[0].scale * (1.0 / weight) if weight else 0.0

    def _update(self, pushes: Sequence[Push], *, gathered: bool, factor: float = 1.0) -> None:
        slots, steps_before = self.rules.slots, len(self.cells) // self.rules.slots
        for push in pushes:
            self.tally["cells"] += len(push.cells)
            for cell in push.cells:
                self.cells.add(cell)
        weight = sum(push.weight for push in pushes)
        self.loss = sum(push.loss for push in pushes) / weight if weight else 0.0
        self.version += 1
        if self.rules.average:
            share = 1.0 if gathered else min(1.0, len(pushes[0].cells) / (slots * self.rules.every))
            self.values.average(pushes, share=share)
            return
        last = gathered or len(self.cells) // slots > steps_before
        used = self.usable(pushes)
        if not used:
            self.values.skip(pushes, loss=self.loss, last=last)
            return
        rate = self.lr_scale * (1.0 if gathered else self._share_of(pushes[0]))
        scale = self.scale_of(used) * factor
        self.values.step(used, scale=scale, lr_scale=rate, loss=self.loss, last=last)

    def _share_of(self, push: Push) -> float:
        """What a gradient of part of the batch counts: together the parts move the model as the whole would."""
        share = min(1.0, len(push.cells) / self.rules.slots) ** self.rules.rate_power
        if not self.rules.damped:
            return share
        delay = max(0, self.version - 1 - push.based_on)
        return share / (1.0 + delay / self.rules.slots)

    def _obey(self, control: Control) -> None:
        self.control = control.number
        match control.action, control.values:
            case "scale", {"factor": int(factor) | float(factor)}:
                self.lr_scale = float(factor)
            case "mark", _:
                self.values.mark()
            case "rollback", _:
                # The pushes that were rolled back stay in the books: their data has been seen.
                self.version += self.values.rollback()
            case "members", {"ranks": list(ranks)}:
                floor = self.floor
                self.members = set(ranks)
                for rank in ranks:
                    # Whoever is new starts where the slowest is, and holds nobody back.
                    self.clocks[rank] = max(self.clocks.get(rank, 0), floor)

    def books(self, *, bulk: Sequence[Frame] = ()) -> tuple[tuple[Frame, ...], dict[str, Any]]:
        """All of it for a new copy, the values' bulk first, or without it for who has that already."""
        kept = [pack(entry) for entry in (*self.open_round, self.closed) if entry is not None]
        # As a frame: with a quorum there may be a gap for every cell that came late.
        cells = array("q", self.cells.to_plain()).tobytes()
        return (*bulk, *(frame for entry in kept for frame in entry.frames), cells), {
            "facts": self.values.facts(),
            "bulk": len(bulk),
            "index": self.index,
            "version": self.version,
            "rounds": self.rounds,
            "members": sorted(self.members),
            "clocks": dict(self.clocks),
            "sequences": dict(self.sequences),
            "kept": [[entry.kind, entry.fields, len(entry.frames)] for entry in kept],
            "lr_scale": self.lr_scale,
            "control": self.control,
            "loss": self.loss,
            "half": self.half,
            "found": self.found,
            "loss_parts": self.loss_parts,
            "tally": dict(self.tally),
            "delays": [self.delay_sum, self.delay_max],
        }

    @classmethod
    def from_books(
        cls,
        rules: ShardRules,
        values: ShardValues,
        frames: Sequence[Frame],
        books: dict[str, Any],
    ) -> Shard:
        """The shard whose `books` these are; its values have what goes with them already."""
        shard = cls(rules, values)
        for name in ("index", "version", "rounds", "lr_scale", "control", "loss", "half", "found", "loss_parts"):
            setattr(shard, name, books[name])
        shard.clocks = dict(books["clocks"])
        shard.sequences = dict(books["sequences"])
        shard.members = set(books["members"])
        if isinstance(cells := frames[-1], torch.Tensor):
            raise ProtocolError("What should fill a shard does not say which cells it has.")
        shard.cells = CellSet.from_plain(array("q", bytes(cells)).tolist())
        shard.tally = Counter(books["tally"])
        shard.delay_sum, shard.delay_max = books["delays"]
        at = books["bulk"]
        for kind, fields, num_frames in books["kept"]:
            entry = unpack(Message(kind, fields, frames[at : at + num_frames]))
            if isinstance(entry, Settle):
                shard.closed = entry
            elif isinstance(entry, Push):
                shard.open_round.append(entry)
            at += num_frames
        return shard


def sum_by_position(rows: Iterable[Sequence[float]]) -> list[float]:
    """Lists of numbers added up, the first with the first and so on."""
    return [sum(column) for column in zip(*rows, strict=False)]
