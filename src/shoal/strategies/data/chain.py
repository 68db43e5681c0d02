"""Sums of gradients from host to host, chunk by chunk, in the order of slots.

Each host holds a contiguous block of slots. Whoever owns a chunk there receives the sum so far from the owner on
the host before, adds its host's slots one by one, and sends it on; the last one sends the total to the owners on
all others. So the fold, and with it every bit, is that of one host with the same slots. All chunks go up before
the first total is awaited: while the last host adds up one, those before it already send the next.

Where each host has one slot, gradients go straight to one host, another for each chunk, which adds them up in the
same order. So all links carry the same, and nothing takes more than two of them.

A chunk may leave *early*, while backward passes go on: as soon as all slots of a host have made its gradients and
the sum so far is there. So totals, too, may be there before the passes are over. Where it turns out that some slot
lacks a gradient, all know it, and what has come early is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from shoal.arena import Grid
from shoal.comm.group import SocketGroup
from shoal.strategies.data.update import ChunkUpdate

_AHEAD = 32
"""Chunks for which a host sends its gradient before it adds up the next of its own: others need not wait."""


class HostChain:
    """One worker's part in it: the chunks that it owns on its host."""

    def __init__(
        self,
        links: SocketGroup,
        hosts: Sequence[range],
        number: int,
        grid: Grid,
        cast: torch.dtype | None,
        before: HostChain | None = None,
        *,
        goes_straight: bool = False,
    ) -> None:
        """`links`: to all workers, by rank. `hosts`: the ranks on each; `number`: this one. `cast`: how float32
        travels. `before`: the chain over the hosts that there were until now, whose totals are kept.
        `goes_straight`: there are several hosts, and each has one slot."""
        self._links = links
        self._number, self._count = number, len(hosts)
        self._owners = [_owners(grid, ranks) for ranks in hosts]
        self._cast = cast
        self.goes_straight = goes_straight
        """Whether all hosts have one slot each."""
        self._early: set[int] = set()
        """Chunks of this step that have left before it was known what all slots have."""
        self._sums: dict[int, torch.Tensor] = {} if before is None else before._sums
        """By chunk: the total. Nobody writes there again: it may still be on its way to others."""
        self._awaited: dict[int, tuple[int, torch.Tensor]] = {}
        """By chunk: the host that sends its total, and a tensor of its shape."""

    def leave_early(self, chunk: int, update: ChunkUpdate) -> bool:
        """Let a chunk go its way, whose gradients this host's slots have made; False where it cannot yet."""
        if not self._has_room(chunk):
            return False
        if self.goes_straight:
            if chunk % self._count != self._number:
                self._send_slot(chunk, update)
        elif self._number and not self._links.has_come(self._owners[self._number - 1][chunk], 2 * chunk):
            return False
        else:
            self._pass_up(chunk, update, None)
        self._early.add(chunk)
        return True

    def _has_room(self, chunk: int) -> bool:
        """Whether a message may be sent without waiting for others."""
        return all(
            self._links.has_room(owners[chunk]) for host, owners in enumerate(self._owners) if host != self._number
        )

    def send_up(
        self,
        chunks: Iterable[tuple[int, ChunkUpdate]],
        touched: object,
        came_early: Sequence[Collection[int]] = (),
    ) -> None:
        """Have all of these chunks summed. `touched`: None where every slot has every gradient. `came_early`: by
        host, the chunks that have left it early."""
        if self.goes_straight and touched is None:
            self._send_straight(list(chunks))
        else:
            chunks = list(chunks)
            if touched is not None:
                self._drop_early(dict(chunks), came_early)
            for chunk, update in chunks:
                if chunk not in self._early:
                    self._pass_up(chunk, update, touched)
        self._early.clear()

    def _pass_up(self, chunk: int, update: ChunkUpdate, touched: object) -> None:
        """Add this host's slots to the sum so far, for the next host; the last one has the total."""
        before, last = self._number - 1, self._count - 1
        total = self._received(update.sum, before, 2 * chunk) if self._number else torch.empty_like(update.sum)
        update.add_slots(total, touched, begins=not self._number)
        if self._number < last:
            self._send(total, self._number + 1, 2 * chunk)
            self._awaited[chunk] = (last, update.sum)
        else:
            self._tell_total(chunk, total)

    def _send_straight(self, chunks: Sequence[tuple[int, ChunkUpdate]]) -> None:
        to_send = iter(chunks)
        for at in range(-_AHEAD, len(chunks)):
            if (following := next(to_send, None)) is not None:
                chunk, update = following
                if (summer := chunk % self._count) != self._number:
                    if chunk not in self._early:
                        self._send_slot(chunk, update)
                    self._awaited[chunk] = (summer, update.sum)
            if at >= 0 and chunks[at][0] % self._count == self._number:
                self._add_up(*chunks[at])

    def _send_slot(self, chunk: int, update: ChunkUpdate) -> None:
        """Send the gradient of this host's slot to whoever adds it up."""
        # From where it lies: nobody changes it before the total has come back.
        self._send(update.only_slot, chunk % self._count, 2 * chunk)

    def _drop_early(self, chunks: Mapping[int, ChunkUpdate], came_early: Sequence[Collection[int]]) -> None:
        """Take what others have sent early, for nothing."""
        own, last = self._number, self._count - 1
        for host, numbers in enumerate(came_early):
            for chunk in chunks.keys() & set(numbers) if host != own else ():
                like = chunks[chunk].sum
                if self.goes_straight:
                    if chunk % self._count == own:
                        self._received(like, host, 2 * chunk)
                elif host == last:
                    self._received(like, host, 2 * chunk + 1)
                elif host == own - 1 and chunk not in self._early:
                    self._received(like, host, 2 * chunk)
        self._early.clear()

    def _add_up(self, chunk: int, update: ChunkUpdate) -> None:
        """Add up the hosts' gradients of a chunk, in the order of slots."""
        hosts = range(self._count)
        parts = (
            update.only_slot if host == self._number else self._received(update.sum, host, 2 * chunk)
            for host in hosts
        )
        total = torch.add(next(parts), next(parts))
        for part in parts:
            total.add_(part)
        self._tell_total(chunk, total)

    def _tell_total(self, chunk: int, total: torch.Tensor) -> None:
        told = total.to(self._travels_as(total))
        for host in range(self._count):
            if host != self._number:
                self._send(told, host, 2 * chunk + 1)
        if told is not total:
            total.copy_(told)  # as the others get it: the same bits everywhere
        self._sums[chunk] = total

    def await_totals(self) -> None:
        """Until what all slots of all hosts come to is here, for all chunks that were sent up."""
        for chunk in sorted(self._awaited):
            host, like = self._awaited.pop(chunk)
            self._sums[chunk] = self._received(like, host, 2 * chunk + 1)

    def total(self, chunk: int) -> torch.Tensor:
        """What all slots of all hosts come to, once awaited; the same until sums of the next step are sent up,
        which is when all hosts have taken this one."""
        return self._sums[chunk]

    def pass_on(self, chunks: Iterable[tuple[int, ChunkUpdate]], giver: int, lacking: Collection[int]) -> None:
        """Bring the totals of the last step from a host that has them all to those that lack some."""
        for chunk, update in chunks:
            total = self._sums.setdefault(chunk, torch.zeros_like(update.sum))
            if self._number == giver:
                for host in lacking:
                    self._send(total, host, 2 * chunk + 1)
            elif self._number in lacking:
                self._sums[chunk] = self._received(total, giver, 2 * chunk + 1)

    def _send(self, content: torch.Tensor, host: int, tag: int) -> None:
        self._links.send(content.to(self._travels_as(content)), self._owners[host][tag // 2], tag)

    def _received(self, like: torch.Tensor, host: int, tag: int) -> torch.Tensor:
        kind = self._travels_as(like)
        awaited = like if kind == like.dtype else torch.empty(like.shape, dtype=kind, device="meta")
        return self._links.take(awaited, self._owners[host][tag // 2], tag).to(like.dtype)

    def _travels_as(self, tensor: torch.Tensor) -> torch.dtype:
        return self._cast if self._cast is not None and tensor.dtype == torch.float32 else tensor.dtype


def _owners(grid: Grid, ranks: range) -> dict[int, int]:
    """By chunk: the rank that owns it on a host with these."""
    return {chunk: rank for at, rank in enumerate(ranks) for chunk in grid.owned_by(at, len(ranks))}
