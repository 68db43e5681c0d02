"""One shard at one server: answers as its primary, or follows as its backup. No sockets, no clocks.

**Why no acknowledged push is lost or made twice.** Holders change only in the register, from one state once. In a
generation the primary answers when its backup has confirmed, or when none may take over: from `CopyDone` on it
waits for the backup, and only then is the backup written down as filled. A backup that wishes to take over
confirms nothing from then on, so the primary it deposes can answer only what the backup has. Both make the same
changes in one order with the same code, and each knows in its memory which requests of which client it has made.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import torch

from shoal.kv.desk import KvDesk
from shoal.kv.holders import Holders, Seat
from shoal.kv.messages import ChangeMade, ChangeTaken, CopyAsk, CopyDone, CopyPart, ShardLetter
from shoal.kv.requests import KvRequest
from shoal.kv.vault import DATA_AT, GENERATION_AT, JOURNAL_AT, VAULT_BYTES, Vault
from shoal.ps.plain.messages import DeskAnswer, WishOutcome

_PART_BYTES, _GAP_BYTES = 16 << 20, 1 << 18


class KvBacking(Enum):
    """Where a primary stands with its backup."""

    NONE = "none"
    """There is none, or it has asked for nothing yet."""
    FILLING = "filling"
    """It is being filled, and nothing changes."""
    SYNCED = "synced"
    """It has every change that is answered."""


@dataclass(eq=False)
class _LogEntry:
    """A change that the backup has not confirmed."""

    letter: ChangeMade
    replies: list[tuple[bytes, DeskAnswer]] = field(default_factory=list)
    """What may be said once it has."""


class ShardCopy:
    """Of one shard, over a memory of this server's."""

    def __init__(self, shard: int, me: Seat, memory: int, *, is_alone: bool) -> None:
        self.shard, self._me, self._memory = shard, me, memory
        self.is_alone = is_alone
        """Nobody else ever holds it, and processes of this host may use its memory."""
        self.holders: Holders | None = Holders(generation=1, primary=me) if is_alone else None
        self.vault = Vault(memory)
        self._desk = KvDesk(self.vault)
        self.backing = KvBacking.NONE
        self.is_fenced = False
        """This backup may have taken over, and confirms nothing."""
        self.answers: deque[tuple[bytes, DeskAnswer]] = deque()
        self.letters: deque[tuple[int, ShardLetter]] = deque()
        self._waiting: dict[bytes, KvRequest] = {}
        self._postponed: dict[bytes, KvRequest] = {}
        self._log: deque[_LogEntry] = deque()
        self._fill_from: int | None = None
        """Of a backup that is being filled: what it asks for next."""

    @property
    def is_primary(self) -> bool:
        """Whether it answers."""
        return self.holders is not None and self.holders.primary == self._me

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for what others do."""
        return bool(self._waiting)

    def on_request(self, request: KvRequest) -> None:
        """Answer now, or when it may be."""
        if not self.is_primary:
            self.answers.append((request.client, self._elsewhere(request)))
        elif self.backing is KvBacking.FILLING and not request.reads:
            self._postponed[request.client] = request
        elif (known := self._waiting.get(request.client)) is not None and known.sequence == request.sequence:
            self.answers.append((request.client, DeskAnswer(sequence=request.sequence, outcome=WishOutcome.WAITS)))
        else:
            self._waiting.pop(request.client, None)
            self._attempt(request)
            self.look_again()

    def look_again(self) -> None:
        """Answer those who have waited long enough."""
        if self.backing is KvBacking.FILLING or not self.is_primary:
            return
        while any(self._attempt(request) for request in list(self._waiting.values())):
            pass  # what one has done, another may have waited for

    def on_letter(self, letter: ShardLetter) -> None:
        """What the other holder says; in a generation there is one other."""
        holders = self.holders
        if holders is None or letter.generation != holders.generation:
            return
        leads, follows = self.is_primary and holders.backup is not None, holders.backup == self._me
        match letter:
            case CopyAsk() if leads and self.backing is not KvBacking.SYNCED:
                self.backing = KvBacking.FILLING
                self._tell(self._part(letter))
            case CopyDone() if leads and self.backing is KvBacking.FILLING and letter.index == self.vault.index:
                self.backing = KvBacking.SYNCED
                self._work_off()
            case ChangeTaken() if leads:
                self._confirm_up_to(letter.index)
            case CopyPart() if follows and letter.asked == self._fill_from:
                self._on_part(letter)
            case ChangeMade() if follows and self._fill_from is None and not self.is_fenced:
                self._on_change_made(letter)

    def _tell(self, letter: ShardLetter) -> None:
        """To the other holder."""
        assert self.holders is not None and self.holders.backup is not None
        other = self.holders.backup if self.is_primary else self.holders.primary
        self.letters.append((other.server, letter))

    def on_tick(self) -> None:
        """Say again what was not answered."""
        if self.holders is None:
            return
        if self.holders.backup == self._me and not self.is_fenced:
            self._ask_or_report(self.holders)
        elif self.is_primary and self.holders.backup is not None:
            for entry in self._log:
                self._tell(entry.letter)
        self.look_again()

    def on_holders(self, holders: Holders) -> None:
        """What the register says by now."""
        before = self.holders
        if before is not None and holders.order <= before.order:
            self.is_fenced = False  # nobody has taken over: what was wished for has not come about
            return
        self.holders, self.is_fenced = holders, False
        if before is not None and before.generation == holders.generation:
            return  # its backup may take over from now on
        if holders.primary == self._me:
            self._lead(holders)
        else:
            self._waiting, self._postponed, self.backing = {}, {}, KvBacking.NONE
            self._log.clear()
            self._fill_from = None
            if holders.backup == self._me:
                self._empty()

    def _lead(self, holders: Holders) -> None:
        self.vault.generation = holders.generation
        self.backing = KvBacking.NONE
        self._fill_from = None
        while self._log:  # who could have taken over cannot any more
            self.answers.extend(self._log.popleft().replies)
        self._work_off()

    def _work_off(self) -> None:
        postponed, self._postponed = self._postponed, {}
        for request in postponed.values():
            self.on_request(request)

    def _attempt(self, request: KvRequest) -> bool:
        """Whether there is an answer."""
        before = self.vault.index
        answer = self._desk.take(request)
        if answer is None:
            self._waiting[request.client] = request
            return False
        self._waiting.pop(request.client, None)
        if self.backing is KvBacking.SYNCED and self.vault.index > before:
            assert self.holders is not None
            letter = ChangeMade(
                shard=self.shard, generation=self.holders.generation, index=self.vault.index, request=request
            )
            self._log.append(_LogEntry(letter))
            self._tell(letter)
        # Nobody acts on what may yet be undone: an answer says only what the backup has, too.
        (self._log[-1].replies if self._log else self.answers).append((request.client, answer))
        return True

    def _confirm_up_to(self, index: int) -> None:
        while self._log and self._log[0].letter.index <= index:
            self.answers.extend(self._log.popleft().replies)

    def _elsewhere(self, request: KvRequest) -> DeskAnswer:
        holders = self.holders
        if holders is None:
            return elsewhere(request, -1)
        was_here = holders.primary.server == self._me.server
        if was_here and not holders.filled and self.vault.generation != holders.generation:
            return DeskAnswer(
                sequence=request.sequence,
                outcome=WishOutcome.REFUSED,
                reason=f"kv: shard {self.shard} is lost: its server was started anew without its memory, and no "
                "other server had all of it.",
            )
        return elsewhere(request, -1 if was_here else holders.primary.server)

    def _empty(self) -> None:
        """Become memory that nobody has written to."""
        os.ftruncate(self._memory, 0)
        os.ftruncate(self._memory, VAULT_BYTES)
        self._fill_from = 0

    def _part(self, ask: CopyAsk) -> CopyPart:
        """What is there from the place asked for on, without what is zero; the journal is none of it."""
        start = _next_data(self.vault.fd, ask.offset)
        if JOURNAL_AT <= start < DATA_AT:
            start = _next_data(self.vault.fd, DATA_AT)
        stop = _end_of_data(self.vault.fd, start, VAULT_BYTES if start >= DATA_AT else JOURNAL_AT)
        data = torch.frombuffer(
            bytearray(os.pread(self.vault.fd, stop - start, start) or b"\0"), dtype=torch.uint8
        )
        return CopyPart(
            shard=self.shard,
            generation=ask.generation,
            asked=ask.offset,
            offset=start,
            behind=-1 if stop >= VAULT_BYTES else stop,
            data=data,
        )

    def _on_part(self, part: CopyPart) -> None:
        assert isinstance(part.data, torch.Tensor)
        if part.offset < VAULT_BYTES:
            os.pwrite(self._memory, part.data.numpy().data, part.offset)
            os.pwrite(self._memory, bytes(8), GENERATION_AT)  # which says that this is all
        assert self.holders is not None
        if part.behind >= 0:
            self._fill_from = part.behind
        else:
            self._fill_from = None
            self.vault.close()
            self.vault = Vault(self._memory)
            self.vault.generation = self.holders.generation
            self._desk = KvDesk(self.vault)
        self._ask_or_report(self.holders)

    def _ask_or_report(self, holders: Holders) -> None:
        """Of a backup: ask for what it lacks, or say how far it has come."""
        names = {"shard": self.shard, "generation": holders.generation}
        letter: ShardLetter
        if self._fill_from is not None:
            letter = CopyAsk(**names, offset=self._fill_from)
        elif holders.filled:
            letter = ChangeTaken(**names, index=self.vault.index)
        else:
            letter = CopyDone(**names, index=self.vault.index)
        self._tell(letter)

    def _on_change_made(self, letter: ChangeMade) -> None:
        if letter.index > self.vault.index + 1:
            return  # the primary says all of it again
        if letter.index == self.vault.index + 1:
            answer = self._desk.take(letter.request)
            assert answer is not None and letter.index == self.vault.index, answer
        self._tell(ChangeTaken(shard=self.shard, generation=letter.generation, index=self.vault.index))


def elsewhere(request: KvRequest, server: int) -> DeskAnswer:
    """Another server has the shard: that one, or -1 where it is not known which."""
    return DeskAnswer(sequence=request.sequence, outcome=WishOutcome.ELSEWHERE, moved_to=server)


def _end_of_data(fd: int, start: int, limit: int) -> int:
    """Where it ends, or where enough of it does: small gaps are cheaper to send than to ask about."""
    stop, most = start, min(start + _PART_BYTES, limit)
    while stop < most and _next_data(fd, stop) <= stop + _GAP_BYTES:
        stop = os.lseek(fd, _next_data(fd, stop), os.SEEK_HOLE)
    return min(stop, most)


def _next_data(fd: int, start: int) -> int:
    """Where memory that somebody has written to begins, from there on."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError:
        return VAULT_BYTES  # there is none
