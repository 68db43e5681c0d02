"""A group over several hosts: shared memory inside each, and a transport between them.

Ranks lie on hosts in contiguous blocks. Sums run along the chain of hosts: the first process of a host, its
*speaker*, receives the sum so far, adds what its host's processes have, one by one in the order of ranks, and
sends it on; the last one sends the total back to all. So the bits are those of one host with the same ranks.
Tensors go piece by piece: while one piece is added up on the last host, the first already sends later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.comm.group.base import (
    BegunSum,
    Fold,
    Group,
    Reduction,
    Rows,
    Transfer,
    flat_in_host,
    largest,
    sum_in_order,
    write_back,
)
from shoal.comm.group.mailroom import Mailroom
from shoal.comm.group.memory import MemoryGroup
from shoal.comm.group.regions import BUFFER_BYTES
from shoal.comm.group.sum_ahead import SumAhead
from shoal.comm.transport import Transport
from shoal.errors import SpecError

MOST_PIECES_AHEAD = 16
"""Pieces of a sum that may be under way on the chain. At least two: a process fills its next buffer before it
takes the last one."""
_SUM, _TOTAL, _COPY = -1, -2, -3
"""Tags of what speakers say to each other."""


class HierarchicalGroup(Group):
    """One process's side of it."""

    def __init__(
        self,
        inside: Group,
        transport: Transport,
        hosts: Rows,
        *,
        on_idle: Callable[[], None] | None = None,
        cast: torch.dtype | None = None,
        mail: Mailroom | None = None,
    ) -> None:
        """`inside`: the processes of this host. `hosts`: the ranks on each, in order. `cast`: float32 travels
        between hosts as this type, and sums are rounded to it at each."""
        self.ranks = tuple(rank for host in hosts for rank in host)
        self.index = self.ranks.index(inside.ranks[inside.index])
        self._inside = inside
        self._hosts = tuple(tuple(host) for host in hosts)
        self._host = next(number for number, host in enumerate(self._hosts) if inside.ranks[0] in host)
        self._cast = cast
        # Several processes of a host would have to come to a sum at the same time.
        self.sums_ahead = cast is None and all(len(ranks) == 1 for ranks in self._hosts)
        self._owns_transport = mail is None
        self._mail = mail or Mailroom(transport, _looking_up(inside, on_idle))
        if mail is None and isinstance(inside, MemoryGroup):
            inside.lookout.chores.append(self._mail.pump)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fold_(tensor, sum_in_order)

    def begin_sum(self, tensor: torch.Tensor, number: int) -> BegunSum:
        if self.sums_ahead:
            return SumAhead(self._mail, self.ranks, self.index, tensor, number)
        return super().begin_sum(tensor, number)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fold_(tensor, largest)

    def reduce_(self, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
        flat = flat_in_host(tensor)
        own = how.brought(flat)
        self._fold_(own, how.fold)
        how.after(own, flat)
        return write_back(flat, tensor)

    def _fold_(self, tensor: torch.Tensor, fold: Fold) -> torch.Tensor:
        flat = flat_in_host(tensor)
        pieces = flat.split(BUFFER_BYTES // flat.element_size())
        kind = _Speaker if self._inside.is_first else _Listener
        _run(self._inside, kind(self, pieces, fold, min(max(2, len(pieces)), MOST_PIECES_AHEAD)))
        return write_back(flat, tensor)

    def fold_between(self, parts: list[torch.Tensor], fold: Fold) -> torch.Tensor | None:
        """The speaker's part of one piece: the sum so far with these, sent on; the total at the last host."""
        if self._host:
            parts = [self._hear(self._host - 1, parts[0], _SUM), *parts]
        total = fold(parts, parts[0] if self._host else torch.empty_like(parts[0]))
        if self._host < len(self._hosts) - 1:
            self._tell(self._host + 1, total, _SUM)
            return None
        for host in range(self._host):
            self._tell(host, total, _TOTAL)
        # What the others get was rounded: the same bits everywhere.
        kind = self._travels_as(total)
        return total if kind == total.dtype else total.to(kind).to(total.dtype)

    def hear_total(self, piece: torch.Tensor) -> torch.Tensor:
        """The total of the next piece, from the last host."""
        return self._hear(len(self._hosts) - 1, piece, _TOTAL)

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
        mine = flat.split([part.numel() for part in parts])[self.index]
        return mine.view(parts[self.index].shape).clone()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.contiguous()
        parts = [own if index == self.index else torch.empty_like(own) for index in range(self.size)]
        self.all_gather_(parts)
        return parts

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        by_host, at = [], 0
        for ranks in self._hosts:
            by_host.append(slices[at : at + len(ranks)])
            at += len(ranks)
        self._inside.all_gather_(by_host[self._host])
        if self._inside.is_first:
            for one in by_host[self._host]:
                self._tell_all(one)
        for host, theirs in enumerate(by_host):
            for one in theirs if host != self._host else ():
                self._copy_from(host, one)

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        host = next(host for host, ranks in enumerate(self._hosts) if self.ranks[index] in ranks)
        if host != self._host:
            return self._copy_from(host, tensor)
        self._inside.broadcast_(tensor, self._hosts[host].index(self.ranks[index]))
        if self._inside.is_first:
            self._tell_all(tensor)
        return tensor

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        rank = self.ranks[to]
        if rank in self._inside.ranks:
            return self._inside.send(tensor, self._inside.ranks.index(rank), tag)
        return self._mail.send(tensor.detach(), rank, self.ranks, tag)

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        rank = self.ranks[sender]
        if rank in self._inside.ranks:
            return self._inside.receive(room, self._inside.ranks.index(rank), tag)
        return self._mail.receive(room.detach(), rank, self.ranks, tag)

    def pump(self) -> None:
        self._mail.pump()

    def split(self, rows: Rows) -> Group:
        if len(rows) == 1:
            return self
        rank, own = self.ranks[self.index], self._hosts[self._host]
        row = next(row for row in rows if rank in row)
        here = [[one for one in other if one in own] for other in rows]
        inside = self._inside.split([part for part in here if part])
        if inside.size == len(row):
            return inside
        hosts = [[one for one in row if one in ranks] for ranks in self._hosts]
        if [one for part in hosts for one in part] != list(row):
            raise SpecError(
                f"A group of the workers {list(row)} would go back and forth between hosts; order them."
            )
        present = [part for part in hosts if part]
        return HierarchicalGroup(inside, self._mail.transport, present, cast=self._cast, mail=self._mail)

    def close(self) -> None:
        self._inside.close()
        if self._owns_transport:
            self._mail.transport.close()

    def abandon(self) -> None:
        """Leave at once, and wait for nobody: some are lost."""
        self._mail.transport.abort()

    def _copy_from(self, host: int, tensor: torch.Tensor) -> torch.Tensor:
        """Take the values that another host's speaker has."""
        if self._inside.is_first:
            room = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._mail.receive(room, self._hosts[host][0], self.ranks, _COPY).wait()
            tensor.detach().copy_(room)
        return self._inside.broadcast_(tensor)

    def _tell_all(self, tensor: torch.Tensor) -> None:
        content = tensor.detach().to("cpu", copy=True)  # so that nobody need wait until it has left
        for host, ranks in enumerate(self._hosts):
            if host != self._host:
                self._mail.send(content, ranks[0], self.ranks, _COPY)

    def _tell(self, host: int, content: torch.Tensor, tag: int) -> None:
        self._mail.send(content.to(self._travels_as(content)), self._hosts[host][0], self.ranks, tag)

    def _hear(self, host: int, like: torch.Tensor, tag: int) -> torch.Tensor:
        found = torch.empty(like.shape, dtype=self._travels_as(like))
        self._mail.receive(found, self._hosts[host][0], self.ranks, tag).wait()
        return found.to(like.dtype)

    def _travels_as(self, tensor: torch.Tensor) -> torch.dtype:
        return self._cast if self._cast is not None and tensor.dtype == torch.float32 else tensor.dtype


class _Speaker:
    """In round k a host's first process adds up piece k, and hands out the total of an earlier one."""

    def __init__(self, group: HierarchicalGroup, pieces: Sequence[torch.Tensor], fold: Fold, ahead: int) -> None:
        self.rounds = len(pieces) + ahead
        self._group, self._pieces, self._fold, self._ahead = group, pieces, fold, ahead
        self._totals: dict[int, torch.Tensor] = {}

    def given(self, number: int) -> torch.Tensor | None:
        """What the others of the host find in this process's buffer in a round."""
        if number < self._ahead:
            return None
        piece = self._pieces[number - self._ahead]
        total = self._totals.pop(number - self._ahead, None)
        return piece.copy_(self._group.hear_total(piece) if total is None else total)

    def take(self, number: int, found: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """`found`: what lies in the others' buffers of such a piece."""
        if number < len(self._pieces):
            piece = self._pieces[number]
            total = self._group.fold_between([piece, *found(piece)], self._fold)
            if total is not None:
                self._totals[number] = total


class _Listener:
    """In round k the others of a host bring piece k, and take the total of an earlier one."""

    def __init__(self, group: HierarchicalGroup, pieces: Sequence[torch.Tensor], fold: Fold, ahead: int) -> None:
        self.rounds = len(pieces) + ahead
        self._pieces, self._ahead = pieces, ahead

    def given(self, number: int) -> torch.Tensor | None:
        return self._pieces[number] if number < len(self._pieces) else None

    def take(self, number: int, found: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        if number >= self._ahead:
            piece = self._pieces[number - self._ahead]
            piece.copy_(found(piece)[0])


def _run(inside: Group, part: _Speaker | _Listener) -> None:
    """All rounds, through the buffers that the processes of a host have for each other."""
    if not isinstance(inside, MemoryGroup):
        for number in range(part.rounds + 1):
            if number < part.rounds:
                part.given(number)
            if number:
                part.take(number - 1, lambda piece: [])
        return
    staging = inside.staging

    def fill(number: int, serial: int) -> None:
        if (piece := part.given(number)) is not None:
            staging.buffer(inside.index, serial, piece.dtype)[: piece.numel()].copy_(piece)

    def take(number: int, serial: int) -> None:
        def found(piece: torch.Tensor) -> list[torch.Tensor]:
            if not inside.is_first:
                staging.wait_for(0, serial)
                return [staging.buffer(0, serial, piece.dtype)[: piece.numel()]]
            staging.wait_for_all(serial)
            return staging.buffers(serial, piece.dtype, slice(piece.numel()))[1:]

        part.take(number, found)

    staging.run(part.rounds, fill, take)


def _looking_up(inside: Group, on_idle: Callable[[], None] | None) -> Callable[[], None] | None:
    """What to do while waiting for another host: letters inside this one are not to wait."""
    return inside.lookout if isinstance(inside, MemoryGroup) else on_idle
