"""A group whose processes share one host's memory: nothing listens, and nothing is copied through the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import torch

from shoal.arena import Segment
from shoal.comm.group.base import (
    Group,
    Reduction,
    Rows,
    Transfer,
    flat_in_host,
    largest,
    sum_in_order,
    write_back,
)
from shoal.comm.group.letters import Inbox, Outbox
from shoal.comm.group.lone import LoneGroup
from shoal.comm.group.regions import GroupMarks, group_regions
from shoal.comm.group.staging import Staging
from shoal.errors import CommTimeout

SMALL_BYTES = 64 << 10
"""Up to here everybody adds up everything, which takes one wait in place of two."""
LINGER_S = 60.0
"""How long a process that leaves waits for its last letters to be taken."""
_HANDLE_BYTES = 64


class Lookout:
    """What a process does every now and then while it waits, in whichever of its groups."""

    def __init__(self, on_idle: Callable[[], None] | None) -> None:
        self._on_idle = on_idle
        self.chores: list[Callable[[], None]] = []
        self.deadline = float("inf")

    def work(self) -> None:
        """What can be done without news."""
        for chore in self.chores:
            chore()

    def __call__(self) -> None:
        self.work()
        if time.monotonic() > self.deadline:
            raise CommTimeout(f"The others have not taken the last letters within {LINGER_S:.0f} s.")
        if self._on_idle is not None:
            self._on_idle()


class MemoryGroup(Group):
    """One process's side of it. Tensors of other devices go through the host's memory."""

    shares_memory = True

    def __init__(self, segment: Segment, index: int, ranks: Sequence[int], lookout: Lookout) -> None:
        """`segment` has the group's regions, and is mapped."""
        self.index, self.ranks = index, tuple(ranks)
        self.lookout = lookout
        self._counters = segment.counters("counters", lookout)
        self._letters = segment.tensor("letters", torch.int64).numpy().reshape(self.size, self.size, -1)
        self.staging = Staging(segment, self._counters, index, self.size)
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._splits: dict[tuple[tuple[int, ...], ...], Group] = {}

    @classmethod
    def of_all(
        cls,
        segment: Segment,
        rank: int,
        size: int,
        on_idle: Callable[[], None] | None,
        ranks: Sequence[int] | None = None,
    ) -> MemoryGroup:
        """All workers of a host, in the segment that they were given; the first to come gives it its size.
        `ranks`: their numbers in the job, where that has other hosts, too."""
        for name, nbytes in group_regions(size).items():
            segment.reserve(name, nbytes)
        segment.map()
        segment.close()
        return cls(segment, rank, range(size) if ranks is None else ranks, Lookout(on_idle))

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.reduce_(tensor, Reduction(sum_in_order))

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.reduce_(tensor, Reduction(largest))

    def reduce_(self, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
        flat, staging = flat_in_host(tensor), self.staging
        pieces = flat.split(staging.room(flat.dtype))

        def fill(piece: int, number: int) -> None:
            own = pieces[piece]
            how.before(own, staging.buffer(self.index, number, own.dtype)[: own.numel()])

        def take(piece: int, number: int) -> None:
            staging.wait_for_all(number)
            result = pieces[piece]
            if self.size == 2 or result.nbytes <= SMALL_BYTES:
                how.fold(staging.buffers(number, flat.dtype, slice(result.numel())), result)
                how.after(result, result)
            else:
                self._fold_shares(result, number, how)

        staging.run(len(pieces), fill, take)
        return write_back(flat, tensor)

    def _fold_shares(self, piece: torch.Tensor, number: int, how: Reduction) -> None:
        """Each makes its share of the result, and takes the others' from them."""
        staging = self.staging
        bounds = [piece.numel() * index // self.size for index in range(self.size + 1)]
        shares = [slice(start, stop) for start, stop in pairwise(bounds)]
        mine = shares[self.index]
        how.fold(staging.buffers(number, piece.dtype, mine), piece[mine])
        how.after(piece[mine], piece[mine])
        # Nobody else reads this part of this buffer, so the result may lie where a summand was.
        staging.buffer(self.index, number, piece.dtype)[mine].copy_(piece[mine])
        staging.tell_folded(number)
        for index, share in enumerate(shares):
            if index != self.index:
                staging.wait_folded(index, number)
                piece[share].copy_(staging.buffer(index, number, piece.dtype)[share])

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        staging, dtype = self.staging, parts[0].dtype
        room = staging.room(dtype) // self.size
        flats = [flat_in_host(part) for part in parts]
        found = torch.empty_like(flats[self.index])

        def fill(piece: int, number: int) -> None:
            buffer = staging.buffer(self.index, number, dtype)
            for index, flat in enumerate(flats):
                content = flat[piece * room : (piece + 1) * room]
                if index != self.index and content.numel():
                    buffer[index * room : index * room + content.numel()].copy_(content)

        def take(piece: int, number: int) -> None:
            staging.wait_for_all(number)
            own = flats[self.index][piece * room : (piece + 1) * room]
            theirs = staging.buffers(number, dtype, slice(self.index * room, self.index * room + own.numel()))
            theirs[self.index] = own
            sum_in_order(theirs, found[piece * room : (piece + 1) * room])

        staging.run(_num_rounds(flats, room), fill, take)
        return found.view(parts[self.index].shape).to(parts[self.index].device)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.contiguous()
        parts = [own if index == self.index else torch.empty_like(own) for index in range(self.size)]
        self.all_gather_(parts)
        return parts

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        staging, dtype = self.staging, slices[0].dtype
        room = staging.room(dtype)
        flats = [flat_in_host(one) for one in slices]

        def fill(piece: int, number: int) -> None:
            content = flats[self.index][piece * room : (piece + 1) * room]
            staging.buffer(self.index, number, dtype)[: content.numel()].copy_(content)

        def take(piece: int, number: int) -> None:
            for index, flat in enumerate(flats):
                wanted = flat[piece * room : (piece + 1) * room]
                if index != self.index and wanted.numel():
                    staging.wait_for(index, number)
                    wanted.copy_(staging.buffer(index, number, dtype)[: wanted.numel()])

        staging.run(_num_rounds(flats, room), fill, take)
        for flat, one in zip(flats, slices, strict=True):
            write_back(flat, one)

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        flat, staging = flat_in_host(tensor), self.staging
        pieces = flat.split(staging.room(flat.dtype))

        def fill(piece: int, number: int) -> None:
            staging.buffer(index, number, flat.dtype)[: pieces[piece].numel()].copy_(pieces[piece])

        def take(piece: int, number: int) -> None:
            if index != self.index:
                staging.wait_for(index, number)
                pieces[piece].copy_(staging.buffer(index, number, flat.dtype)[: pieces[piece].numel()])

        staging.run(len(pieces), fill if index == self.index else None, take)
        return write_back(flat, tensor)

    def barrier(self) -> None:
        self.staging.run(1, lambda piece, number: None, lambda piece, number: self.staging.wait_for_all(number))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        if to not in self._outboxes:
            marks, letters = GroupMarks(self.size), self._letters[self.index, to]
            sent, taken = marks.sent(self.index, to), marks.taken(self.index, to)
            self._outboxes[to] = Outbox(self._counters, sent, taken, letters)
            self.lookout.chores.append(self._outboxes[to].push)
        return self._outboxes[to].send(tensor.detach(), tag)

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        if sender not in self._inboxes:
            marks, letters = GroupMarks(self.size), self._letters[sender, self.index]
            sent, taken = marks.sent(sender, self.index), marks.taken(sender, self.index)
            self._inboxes[sender] = Inbox(self._counters, sent, taken, letters, self.ranks[sender])
        self.lookout.work()
        return self._inboxes[sender].receive(room.detach(), tag)

    def split(self, rows: Rows) -> Group:
        key = tuple(tuple(row) for row in rows)
        if key not in self._splits:
            self._splits[key] = self._split(key)
        return self._splits[key]

    def _split(self, rows: tuple[tuple[int, ...], ...]) -> Group:
        rank = self.ranks[self.index]
        row = next(row for row in rows if rank in row)
        if len(rows) == 1:
            return self
        if all(len(one) == 1 for one in rows):
            return LoneGroup(rank)
        segment = self._share_in(rows, group_regions(len(row)))
        return MemoryGroup(segment, row.index(rank), row, self.lookout) if len(row) > 1 else LoneGroup(rank)

    def share(self, regions: Mapping[str, int]) -> Segment:
        return self._share_in((self.ranks,), regions)

    def _share_in(self, rows: tuple[tuple[int, ...], ...], regions: Mapping[str, int]) -> Segment:
        """Memory for each row, which its first process makes and tells the others of."""
        rank = self.ranks[self.index]
        maker = next(row[0] for row in rows if rank in row)
        segment = Segment() if rank == maker else None
        told = self.all_gather(_as_row("" if segment is None else segment.handle))
        if segment is None:
            segment = Segment.of(_as_text(told[self.ranks.index(maker)]))
        for name, nbytes in regions.items():
            segment.reserve(name, nbytes)
        segment.map()
        self.barrier()  # a maker's descriptor must outlive the others' look-up
        segment.close()
        return segment

    def close(self) -> None:
        for part in self._splits.values():
            if part is not self:
                part.close()
        self.lookout.deadline = time.monotonic() + LINGER_S
        with suppress(CommTimeout):
            for outbox in self._outboxes.values():
                outbox.settle()


def _num_rounds(flats: Sequence[torch.Tensor], room: int) -> int:
    return max(1, *(-(-flat.numel() // room) for flat in flats))


def _as_row(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode().ljust(_HANDLE_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode()
