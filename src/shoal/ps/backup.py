"""The backup's duties for one shard: be filled, take the primary's log in order, say how far it has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shoal.comm.codec import Message
from shoal.errors import ShoalError
from shoal.ps.between_servers import Fill, Filled, Replicate, Replicated, Settle
from shoal.ps.contract import ShardValues
from shoal.ps.inheritance import note_books, note_entry
from shoal.ps.messages import Control, Push, ShardView
from shoal.ps.packing import unpack
from shoal.ps.primary import Send
from shoal.ps.rules import ShardRules
from shoal.ps.shard import Shard


class Backup:
    """One shard at its backup, in one generation: a backup that stays for the next one is filled anew."""

    def __init__(
        self,
        number: int,
        holders: ShardView,
        shard: Shard | None,
        rules: ShardRules,
        make_values: Callable[[], ShardValues],
        send: Send,
    ) -> None:
        self.number = number
        self.holders = holders
        self.shard = shard
        """None until it is filled: so long it is no copy of anything, and cannot take over."""
        self.ignored: Counter[str] = Counter()
        self._is_moving = False
        self._rules = rules
        self._make_values = make_values
        self._send = send

    @property
    def copy(self) -> int:
        """Which of the shard's two copies is its own."""
        return 1 - self.holders.copy

    def note_moving(self, is_moving: bool) -> None:
        """Whether the shard is about to change hands: then whoever has all of it keeps a journal."""
        if is_moving and not self._is_moving and self.shard is not None:
            note_books(self.shard)
        elif not is_moving and self.shard is not None and self.shard.values.journal is not None:
            self.shard.values.journal.give_up()
        self._is_moving = is_moving

    def on_fill(self, fill: Fill) -> None:
        """Become what the primary is; only once, for the primary stands still only until it knows."""
        if self.shard is None:
            try:
                values = self._make_values()
                values.load(fill.frames[: fill.books["bulk"]], fill.books["facts"])
                self.shard = Shard.from_books(self._rules, values, fill.frames, fill.books)
                if self._is_moving:
                    note_books(self.shard)
            except (ShoalError, LookupError, TypeError, ValueError):
                self.ignored["malformed fill"] += 1
                return
        self._send(
            self.holders.primary,
            Filled(shard=self.number, generation=self.holders.generation, index=fill.index),
        )

    def on_replicate(self, message: Replicate) -> None:
        """Take the log's next entry. What comes again is only confirmed; after a gap the primary repeats all."""
        if self.shard is None or message.index > self.shard.index + 1:
            self.ignored["gap"] += 1
            return
        if message.index == self.shard.index + 1:
            entry = self._entry(message)
            if entry is None:
                self.ignored["malformed entry"] += 1
                return
            note_entry(self.shard, entry)
            self.shard.accept(entry)
        self._send(
            self.holders.primary,
            Replicated(shard=self.number, generation=self.holders.generation, index=self.shard.index),
        )

    @staticmethod
    def _entry(message: Replicate) -> Push | Control | Settle | None:
        try:
            entry = unpack(Message(message.entry["kind"], message.entry["fields"], message.frames))
        except (ShoalError, LookupError, TypeError, AttributeError):
            return None
        return entry if isinstance(entry, Push | Control | Settle) else None
