"""What a shard's server leaves in the host's memory, so that a successor can go on where it was killed.

Beside a shard's values lie two halves. One of them holds the shard's books of some moment and the log's entries
since then, each written before it is applied; when it is full, the books of that moment begin the other half. A
word of the half says how many entries there are, and how far the newest has come: how many blocks have it, and
whether the next is torn. A block's old values are saved before it changes, as in the arena's redo journal.

Every change is one store of a word, made after all that the word speaks of. So whoever reads them after a death
finds one moment of the shard; and the newest entry can be done again with the same bits, for its gradients are
still there: nobody was told that their buffers are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch

from shoal.comm.codec import Frame, Message, decode, encode
from shoal.errors import LaunchError
from shoal.strategies.ps.memory import ServedMemory

MOST_ENTRIES = 512
"""After so many the books are written anew; a successor takes in all entries of a half again."""
_COMPLETE = (1 << 32) - 1
_SIZE = 8
"""Bytes of a record's length, and of those of its parts."""


class _State(IntEnum):
    """What the first word says."""

    BLANK = 0
    """No primary has begun here: nothing has been trained."""
    FIRST_HALF = 1
    SECOND_HALF = 2
    VOID = 3
    """What lies here has no journal."""


class SegmentJournal:
    """The journal of one copy of one shard. `live`: by block, all that an update of it changes."""

    def __init__(
        self,
        memory: ServedMemory,
        shard: int,
        copy: int,
        live: Sequence[Sequence[torch.Tensor]],
        *,
        saves_blocks: bool = True,
    ) -> None:
        self._memory = memory
        self._saves_blocks = saves_blocks
        self._words, *self._halves = memory.journal(shard, copy)
        self._live = [list(tensors) for tensors in live]
        undo = memory.undo(shard, copy)
        self._saved = [_cut(undo, tensors) for tensors in live]
        self.is_kept = False
        """Whether this process keeps it, or takes in what is in it; else updates are none of its business."""
        self._half = int(self._words[0] == _State.SECOND_HALF)
        self._at = 0
        """Where the next record goes."""
        self._entries = 0
        self._progress = 0
        """Of the newest entry: twice the blocks that have it, and one more inside the next."""

    # The shard's log.

    @property
    def is_void(self) -> bool:
        """Whether nobody can go on from here."""
        return self._words[0] == _State.VOID

    def give_up(self) -> None:
        """What lies here from now on has no journal."""
        self._words[0] = _State.VOID
        self.is_kept = False

    def begin(self, books: Message) -> bool:
        """From now on entries follow these books; whether there was room for them."""
        half = 1 - self._half
        end = self._write(half, 0, books)
        if end is None:
            return False
        self._words[1 + half] = 0
        self._words[0] = _State.FIRST_HALF + half
        self._half, self._at, self._entries, self._progress = half, end, 0, 0
        self.is_kept = True
        return True

    def append(self, entry: Message) -> bool:
        """Note an entry that is about to be applied; whether there was room for it."""
        if self._entries == MOST_ENTRIES or (end := self._write(self._half, self._at, entry)) is None:
            return False
        self._at, self._entries = end, self._entries + 1
        self._set_progress(0)
        return True

    def books(self) -> Message | None:
        """The books that the last primary began with; None where there was none."""
        if self._words[0] not in (_State.FIRST_HALF, _State.SECOND_HALF):
            return None
        self._entries, self._progress = divmod(self._words[1 + self._half], 1 << 32)
        books, self._at = self._read(0)
        self.is_kept = True
        return books

    def entries(self) -> Iterator[Message]:
        """The entries that followed. While one is taken in, `todo` says what of it the values lack."""
        progress = self._progress
        for number in range(self._entries):
            self._progress = progress if number + 1 == self._entries else _COMPLETE
            entry, self._at = self._read(self._at)
            yield entry

    # The newest entry's way into the values.

    @property
    def is_complete(self) -> bool:
        """Whether the values have all of the newest entry."""
        return self._progress == _COMPLETE

    def todo(self) -> range:
        """The blocks that do not have it yet."""
        return range(len(self._live) if self.is_complete else self._progress // 2, len(self._live))

    def save(self, block: int) -> None:
        """A block is about to change."""
        if self._saves_blocks:
            torch._foreach_copy_(self._saved[block], self._live[block])
        self._set_progress(2 * block + 1)

    def note_changed(self, block: int) -> None:
        """A block has the entry."""
        self._set_progress(2 * block + 2)

    def note_complete(self) -> None:
        """All that the entry changes has it."""
        self._set_progress(_COMPLETE)

    @property
    def torn(self) -> int | None:
        """The block that a killed server was changing."""
        return None if self.is_complete or self._progress % 2 == 0 else self._progress // 2

    def put_back(self, block: int) -> None:
        """Let a torn block be what it was before."""
        if not self._saves_blocks:
            raise LaunchError(
                "A server was killed in the middle of an update, and journal=off saves nothing that could make it "
                "good; start the run again, or resume it, with journal=on, or with two servers and replicas=1."
            )
        torch._foreach_copy_(self._live[block], self._saved[block])
        self._set_progress(2 * block)

    def _set_progress(self, progress: int) -> None:
        self._progress = progress
        self._words[1 + self._half] = (self._entries << 32) + progress

    # Records: the number of parts, their lengths, the parts.

    def _write(self, half: int, at: int, message: Message) -> int | None:
        """Put a record there; where it ends, None without room. Frames that lie in the segment stay there."""
        locations = [self._location_of(frame) for frame in message.frames]
        moved = [frame for frame, location in zip(message.frames, locations, strict=True) if location is None]
        fields = {"kind": message.kind, "fields": message.fields, "locations": locations}
        buffers = [memoryview(part).cast("B") for part in encode(Message("record", fields, moved))]
        lengths = [len(buffers), *(part.nbytes for part in buffers)]
        target = self._halves[half]
        end = at + _SIZE * len(lengths) + sum(lengths[1:])
        if end > len(target):
            return None
        head = memoryview(b"".join(length.to_bytes(_SIZE, "little") for length in lengths))
        for part in (head, *buffers):
            target[at : at + part.nbytes] = part
            at += part.nbytes
        return end

    def _read(self, at: int) -> tuple[Message, int]:
        source = self._halves[self._half]

        def number(position: int) -> int:
            return int.from_bytes(source[position : position + _SIZE], "little")

        lengths = [number(at + _SIZE * (1 + part)) for part in range(number(at))]
        at += _SIZE * (1 + len(lengths))
        buffers = []
        for length in lengths:
            buffers.append(
                bytes(source[at : at + length])
            )  # The half is written again; frames may be kept longer.
            at += length
        record = decode(buffers)
        moved = iter(record.frames)
        frames = [
            next(moved) if location is None else self._frame_at(location)
            for location in record.fields["locations"]
        ]
        return Message(record.fields["kind"], record.fields["fields"], frames), at

    def _location_of(self, frame: Frame) -> list[Any] | None:
        if not isinstance(frame, torch.Tensor) or not frame.numel():
            return None
        offset = self._memory.segment.offset_of(frame)
        return None if offset is None else [offset, str(frame.dtype).removeprefix("torch."), list(frame.shape)]

    def _frame_at(self, location: Sequence[Any]) -> torch.Tensor:
        offset, dtype, shape = location
        return self._memory.segment.view(offset, getattr(torch, dtype), shape)


def _cut(room: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Room of the tensors' sizes, one behind the other."""
    locations, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        locations.append(room[at : at + nbytes].view(tensor.dtype))
        at += padded(nbytes)
    return locations


def padded(nbytes: int) -> int:
    """Room for so many bytes, so that what follows is aligned."""
    return -(-nbytes // 64) * 64
