"""Sums of gradients from host to host, chunk by chunk, in the order of slots.

Each host holds a contiguous block of slots. Whoever owns a chunk there receives the sum so far from the owner on
the host before, adds its host's slots one by one, and sends it on; the last one sends the total to the owners on
all others. So the fold, and with it every bit, is that of one host with the same slots. All chunks go up before
the first total is awaited: while the last host adds up one, those before it already send the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from shoal.arena import Grid
from shoal.comm.group import Group
from shoal.strategies.data.update import ChunkUpdate


class HostChain:
    """One worker's part in it: the chunks that it owns on its host."""

    def __init__(
        self,
        links: Group,
        hosts: Sequence[range],
        number: int,
        grid: Grid,
        cast: torch.dtype | None,
        before: HostChain | None = None,
    ) -> None:
        """`links`: to all workers, by rank. `hosts`: the ranks on each; `number`: this one. `cast`: how float32
        travels. `before`: the chain over the hosts that there were until now, whose totals are kept."""
        self._links = links
        self._number, self._last = number, len(hosts) - 1
        self._owners = [_owners(grid, ranks) for ranks in hosts]
        self._cast = cast
        self._sums: dict[int, torch.Tensor] = {} if before is None else before._sums
        """By chunk: the sum so far, and then the total. Nobody writes there before the others have what was sent
        from it: the totals of a step come back only then."""
        self._awaited: set[int] = set()

    def send_up(self, chunks: Iterable[tuple[int, ChunkUpdate]], touched: object) -> None:
        """Let all of these chunks go along the chain."""
        for chunk, update in chunks:
            total = self._sums.setdefault(chunk, torch.empty_like(update.sum))
            if self._number:
                self._receive(total, self._number - 1, 2 * chunk)
            update.add_slots(total, touched, begins=not self._number)
            if self._number < self._last:
                self._send(total, self._number + 1, 2 * chunk)
                self._awaited.add(chunk)
                continue
            for host in range(self._last):
                self._send(total, host, 2 * chunk + 1)
            if self._travels_as(total) != total.dtype:
                total.copy_(total.to(self._travels_as(total)))  # as the others get it: the same bits everywhere

    def await_totals(self) -> None:
        """Until what all slots of all hosts come to is here, for all chunks that were sent up."""
        for chunk in sorted(self._awaited):
            self._receive(self._sums[chunk], self._last, 2 * chunk + 1)
            self._awaited.discard(chunk)

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
                self._receive(total, giver, 2 * chunk + 1)

    def _send(self, content: torch.Tensor, host: int, tag: int) -> None:
        self._links.send(content.to(self._travels_as(content)), self._owners[host][tag // 2], tag)

    def _receive(self, room: torch.Tensor, host: int, tag: int) -> None:
        kind = self._travels_as(room)
        found = room if kind == room.dtype else torch.empty(room.shape, dtype=kind)
        self._links.receive(found, self._owners[host][tag // 2], tag).wait()
        if found is not room:
            room.copy_(found)

    def _travels_as(self, tensor: torch.Tensor) -> torch.dtype:
        return self._cast if self._cast is not None and tensor.dtype == torch.float32 else tensor.dtype


def _owners(grid: Grid, ranks: range) -> dict[int, int]:
    """By chunk: the rank that owns it on a host with these."""
    return {chunk: rank for at, rank in enumerate(ranks) for chunk in grid.owned_by(at, len(ranks))}
