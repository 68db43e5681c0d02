"""What compresses pushes, slot by slot, and what has not been sent yet, where that outlives its worker.

It lies in the memory of the worker's host, as it was after each of a slot's last pushes. Whoever has the slot next
on that host, because its worker died or slots were dealt anew, goes on from what there was before the clock that
comes next: the same gradient makes the same bytes once more. A checkpoint gets what all slots of the host have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import torch

from shoal.checkpoint.aside import put_aside
from shoal.comm.compression import Compression, make_compression
from shoal.comm.compression.lossy import Lossy, working_type
from shoal.spec import World
from shoal.strategies.groups.kept_apart import KeptApart
from shoal.strategies.ps.memory import ServedMemory, word_of
from shoal.strategies.ps.parcelling import parcels

_ALIGN = 64
_HEAD_BYTES = 256
"""Of a parcel, at most: names, types and shapes of what is remembered of it, and how far that is from a line."""
_WORD, _KIND = "unsent", "push"


class PushCodecs:
    """A worker's compressions, one for each slot that it has pushed for."""

    def __init__(
        self,
        text: str,
        memory: ServedMemory,
        world: World,
        *,
        slots: int,
        kept: int,
        saved: Mapping[str, torch.Tensor],
    ) -> None:
        """`kept`: of so many pushes of a slot it is known what they left; `saved`: what a checkpoint put aside."""
        self._text = text
        self._codecs: dict[int, Compression] = {}
        self._clocks: dict[int, int] = {}
        """By slot: the clock of the last push that was made here."""
        self._saved = KeptApart(_WORD, saved)
        example = make_compression(text)
        self._left = _LeftByPushes(memory, example, world, slots, kept) if isinstance(example, Lossy) else None
        self.leaves_some = self._left is not None
        """Whether a push may leave something unsent: else nobody has to `begin` and `end` it."""

    def begin(self, slot: int, clock: int) -> None:
        """A push of this slot comes next: have what was left of those before, whoever made them."""
        if self._left is None:
            return
        found = self._left.newest(slot, before=clock)
        if found != self._clocks.get(slot, 0) or slot not in self._codecs:
            codec = self.of(slot)
            codec.remember(self._left.read(slot, found) if found else self._saved.of(slot, _KIND))
        self._clocks[slot] = clock

    def of(self, slot: int) -> Compression:
        """The one of a slot."""
        if slot not in self._codecs:
            self._codecs[slot] = make_compression(self._text)
        return self._codecs[slot]

    def end(self, slot: int) -> None:
        """The push has been made."""
        if self._left is not None:
            self._left.write(slot, self._clocks[slot], self.of(slot).remembered())

    def put_aside(self, after: int | None) -> dict[str, torch.Tensor]:
        """For a checkpoint: of every slot of this host, what has not been sent yet after this clock's push, for
        some may have made the next one; None: after the last."""
        left = {} if self._left is None else self._left.named(None if after is None else after + 1)
        return put_aside({f"{_WORD}/{name}": one for name, one in left.items()})

    def facts(self) -> dict[str, Any]:
        """The bytes that went through all of them."""
        raw, wire = (
            sum(getattr(one, name) for one in self._codecs.values()) for name in ("raw_bytes", "wire_bytes")
        )
        return {"compress": self._text, "raw_bytes": raw, "wire_bytes": wire, "ratio": wire / raw if raw else 1.0}


class _LeftByPushes:
    """By slot, what was remembered after its last pushes: one more than may be under way."""

    def __init__(self, memory: ServedMemory, example: Compression, world: World, slots: int, copies: int) -> None:
        self._slots, self._copies = range(slots), range(copies)
        # Whoever begins again does so in memory of its own, but for hosts that stay between two attempts.
        self._attempt = word_of(world.attempt)
        self._room_bytes = _room(memory, example)
        self._rooms = [[memory.pushed.room(slot * copies + copy) for copy in self._copies] for slot in self._slots]

    def newest(self, slot: int, *, before: int | None = None) -> int:
        """The clock of the last push that has left something here, of those before a clock; 0: there is none."""
        clocks = [clock for copy in self._copies if (clock := self._clock(slot, copy))]
        return max((clock for clock in clocks if before is None or clock < before), default=0)

    def write(self, slot: int, clock: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Leave what is remembered after this clock's push, in the place of the oldest."""
        copy = min(self._copies, key=lambda each: self._clock(slot, each))
        words, memory = self._words(slot, copy), self._memory(slot, copy)
        words[0] = 0  # a death in the middle leaves nothing here, and the one before untouched
        at = 0
        for tensor in tensors.values():
            _view(memory, at, tensor.dtype, tensor.shape).copy_(tensor)
            at = _after(at, tensor)
        looks = [[name, str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()]
        head = torch.frombuffer(bytearray(msgpack.packb(looks)), dtype=torch.uint8)
        memory[at : at + len(head)] = head
        words[1], words[2], words[3] = self._attempt, at, len(head)
        words[0] = clock

    def read(self, slot: int, clock: int) -> dict[str, torch.Tensor]:
        """What was left after this clock's push, where it lies."""
        copy = next(copy for copy in self._copies if self._clock(slot, copy) == clock)
        memory, (_, _, end, length) = self._memory(slot, copy), self._words(slot, copy)[:4].tolist()
        found, at = {}, 0
        for name, dtype, shape in msgpack.unpackb(memory[end : end + length].numpy().tobytes()):
            found[name] = _view(memory, at, getattr(torch, dtype), shape)
            at = _after(at, found[name])
        return found

    def named(self, before: int | None) -> dict[str, torch.Tensor]:
        """All that was left last, of pushes before a clock, as `slot/kind/name`."""
        newest = {slot: clock for slot in self._slots if (clock := self.newest(slot, before=before))}
        return {
            f"{slot}/{_KIND}/{name}": one.clone()
            for slot, clock in newest.items()
            for name, one in self.read(slot, clock).items()
        }

    def _clock(self, slot: int, copy: int) -> int:
        clock, attempt = self._words(slot, copy)[:2].tolist()
        return int(clock) if attempt == self._attempt else 0

    def _words(self, slot: int, copy: int) -> memoryview:
        return self._rooms[slot][copy].words

    def _memory(self, slot: int, copy: int) -> torch.Tensor:
        return self._rooms[slot][copy].bytes(0, self._room_bytes)


def _room(memory: ServedMemory, example: Compression) -> int:
    """The most that is remembered of a slot: as much as was not sent, and directions that are fewer numbers."""
    pieces = [one for shard in range(len(memory.blocks)) for one in parcels(memory, shard, "gradients/0", example)]
    return sum(2 * one.numel() * working_type(one.dtype).itemsize + 3 * (_HEAD_BYTES + _ALIGN) for one in pieces)


def _view(memory: torch.Tensor, at: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return memory[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def _after(at: int, tensor: torch.Tensor) -> int:
    return -(-(at + tensor.nbytes) // _ALIGN) * _ALIGN
