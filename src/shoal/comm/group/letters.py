"""Messages from one process to another, through memory of the sender's.

For each pair the group's segment has a ring of letters, which say what is sent and where it lies, and two
counters: letters posted, and letters taken. The content lies in a crate, memory that the sender makes when it
needs it and fills again once the letter that came with it was taken. A send never waits: what finds no free letter
is kept, and posted later, at the latest when this process next looks up from a wait. So workers that send before
they receive cannot block one another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shoal.arena import Counters, Segment
from shoal.arena.tensors import as_bytes
from shoal.comm.group.base import Transfer
from shoal.comm.group.regions import LETTER_NUMBERS, MOST_LETTERS
from shoal.errors import PeerLost, ProtocolError

SMALLEST_CRATE_BYTES = 16 << 10
LARGEST_KEPT_BYTES = 4 << 20
"""Larger crates are given back as soon as they were emptied: they would count against a limit of memory."""
_NO_CRATE = -1


class Letter(NamedTuple):
    """What the receiver must know; a row of the ring."""

    tag: int
    nbytes: int
    shelf: int
    """The sender's number of the crate; -1 where nothing is in it."""
    serial: int
    """Which crate it is that stands on this shelf now."""
    capacity: int
    pid: int
    fd: int
    """By which the receiver opens it."""

    @classmethod
    def read(cls, row: np.ndarray) -> Letter:
        return cls(*row[: len(cls._fields)].tolist())


@dataclass
class _Crate:
    """Memory that one process fills and another empties."""

    serial: int
    capacity: int
    segment: Segment
    room: torch.Tensor
    letter: int = 0
    """The number of the letter that it came with last."""

    @classmethod
    def made(cls, serial: int, capacity: int) -> _Crate:
        return cls._mapped(serial, capacity, Segment())

    @classmethod
    def opened(cls, letter: Letter) -> _Crate:
        crate = cls._mapped(letter.serial, letter.capacity, Segment.of(f"{letter.pid}:{letter.fd}"))
        crate.segment.close()
        return crate

    @classmethod
    def _mapped(cls, serial: int, capacity: int, segment: Segment) -> _Crate:
        segment.reserve("crate", capacity)
        segment.map()
        return cls(serial, capacity, segment, segment.tensor("crate", torch.uint8))


class Outbox:
    """What this process sends to one other."""

    def __init__(self, counters: Counters, sent: int, taken: int, letters: np.ndarray) -> None:
        """`sent`, `taken`: the counters of this pair."""
        self._counters = counters
        self._sent_mark, self._taken_mark = sent, taken
        self._letters = letters.reshape(MOST_LETTERS, LETTER_NUMBERS)
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()
        self._posted = 0
        self._crates: list[_Crate | None] = []
        self._num_crates = 0

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        """Post it, or keep it until that can be done."""
        self._waiting.append((tag, as_bytes(tensor.contiguous())))
        self.push()
        return _Sending(self, self._posted + len(self._waiting))

    def push(self) -> None:
        """Post what was kept, as far as letters are free."""
        while self._waiting and self._posted - self._counters[self._taken_mark] < MOST_LETTERS:
            self._post(*self._waiting.popleft())

    def settle(self) -> None:
        """Wait until everything was taken."""
        self.wait_until_taken(self._posted + len(self._waiting))

    def wait_until_taken(self, number: int) -> None:
        """Wait until the other has taken this letter."""
        while self._posted < number:
            self._counters.wait(self._taken_mark, self._posted - MOST_LETTERS + 1)
            self.push()
        self._counters.wait(self._taken_mark, number)
        self._drop_large_ones()

    def _post(self, tag: int, content: torch.Tensor) -> None:
        number = self._posted + 1
        letter = Letter(tag, 0, _NO_CRATE, 0, 0, 0, 0)
        if nbytes := content.numel():
            shelf, crate = self._free_crate(nbytes)
            crate.letter = number
            crate.room[:nbytes].copy_(content)
            pid, fd = map(int, crate.segment.handle.split(":"))
            letter = Letter(tag, nbytes, shelf, crate.serial, crate.capacity, pid, fd)
        self._letters[number % MOST_LETTERS, : len(letter)] = letter
        self._counters.publish(self._sent_mark, number)
        self._posted = number

    def _free_crate(self, nbytes: int) -> tuple[int, _Crate]:
        """The smallest empty one that is large enough; else a new one, in the place of one that is not."""
        self._drop_large_ones()
        taken = self._counters[self._taken_mark]
        free = {shelf: one for shelf, one in enumerate(self._crates) if one is None or one.letter <= taken}
        fitting = [(one.capacity, shelf) for shelf, one in free.items() if one is not None]
        if fits := [pair for pair in fitting if pair[0] >= nbytes]:
            shelf = min(fits)[1]
        else:
            shelf = next(iter(free), len(self._crates))
            if shelf == len(self._crates):
                self._crates.append(None)
            self._drop(shelf)
            self._num_crates += 1
            self._crates[shelf] = _Crate.made(self._num_crates, _capacity(nbytes))
        crate = self._crates[shelf]
        assert crate is not None
        return shelf, crate

    def _drop_large_ones(self) -> None:
        taken = self._counters[self._taken_mark]
        for shelf, crate in enumerate(self._crates):
            if crate is not None and crate.capacity > LARGEST_KEPT_BYTES and crate.letter <= taken:
                self._drop(shelf)

    def _drop(self, shelf: int) -> None:
        if (crate := self._crates[shelf]) is not None:
            crate.segment.close()
            self._crates[shelf] = None


def _capacity(nbytes: int) -> int:
    """A little more than is needed now, so that messages of about one size find room in the same crates."""
    if nbytes > LARGEST_KEPT_BYTES:
        return nbytes
    return max(SMALLEST_CRATE_BYTES, 1 << (nbytes - 1).bit_length())


class Inbox:
    """What one other process sends to this one."""

    def __init__(self, counters: Counters, sent: int, taken: int, letters: np.ndarray, sender: int) -> None:
        """`sender`: its rank, for errors."""
        self._counters = counters
        self._sent_mark, self._taken_mark = sent, taken
        self._letters = letters.reshape(MOST_LETTERS, LETTER_NUMBERS)
        self._sender = sender
        self._taken = 0
        self._crates: dict[int, _Crate] = {}
        self._early: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
        """By tag: what came before it was asked for."""

    def receive(self, room: torch.Tensor, tag: int) -> Transfer:
        """The next content under this tag, into this room."""
        return _Receiving(self, as_bytes(room), tag)

    def take(self, room: torch.Tensor, tag: int) -> None:
        """Wait for it; what comes first under other tags is kept."""
        while not self._early[tag]:
            self._counters.wait(self._sent_mark, self._taken + 1)
            letter = Letter.read(self._letters[(self._taken + 1) % MOST_LETTERS])
            content = self._content(letter)
            if letter.tag == tag:
                self._fill(room, content)
                self._tell_taken()
                del self._early[tag]
                return
            self._early[letter.tag].append(content.clone())
            self._tell_taken()
        self._fill(room, self._early[tag].popleft())

    def _tell_taken(self) -> None:
        self._taken += 1
        self._counters.publish(self._taken_mark, self._taken)

    def _content(self, letter: Letter) -> torch.Tensor:
        if letter.shelf == _NO_CRATE:
            return torch.empty(0, dtype=torch.uint8)
        crate = self._crates.pop(letter.shelf, None)
        if crate is None or crate.serial != letter.serial:
            try:
                crate = _Crate.opened(letter)
            except OSError as error:
                text = f"Worker {self._sender} is gone: what it sent cannot be read ({error.strerror})."
                raise PeerLost(text, peer=str(self._sender)) from None
        if crate.capacity <= LARGEST_KEPT_BYTES:
            self._crates[letter.shelf] = crate
        return crate.room[: letter.nbytes]

    def _fill(self, room: torch.Tensor, content: torch.Tensor) -> None:
        if room.numel() != content.numel():
            raise ProtocolError(
                f"Worker {self._sender} sent {content.numel()} bytes where {room.numel()} were awaited; all "
                "workers must run the same code on the same task.",
                peer=str(self._sender),
            )
        room.copy_(content)


@dataclass(frozen=True)
class _Sending:
    outbox: Outbox
    letter: int

    def wait(self) -> None:
        self.outbox.wait_until_taken(self.letter)


@dataclass(frozen=True)
class _Receiving:
    inbox: Inbox
    room: torch.Tensor
    tag: int

    def wait(self) -> None:
        self.inbox.take(self.room, self.tag)
