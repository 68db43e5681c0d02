"""A group over our own transport: authenticated, and every byte checked. Sums are made at the first worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.comm.group.base import Fold, Group, Rows, Transfer, largest, sum_in_order
from shoal.comm.group.lone import LoneGroup
from shoal.comm.group.mailroom import Mailroom
from shoal.comm.group.sum_ahead import SumAhead
from shoal.comm.transport import Transport

_OF_ALL = -1
"""The tag of what everybody says together."""


class SocketGroup(Group):
    """Workers with a transport each; all of its peers, or a row of them."""

    sums_ahead = True

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        *,
        on_idle: Callable[[], None] | None = None,
        mail: Mailroom | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(transport.rank)
        self._mail = mail or Mailroom(transport, on_idle)
        self._owns_transport = mail is None

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fold_(tensor, sum_in_order)

    def begin_sum(self, tensor: torch.Tensor, number: int) -> SumAhead:
        return SumAhead(self._mail, self.ranks, self.index, tensor, number)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fold_(tensor, largest)

    def _fold_(self, tensor: torch.Tensor, fold: Fold) -> torch.Tensor:
        found = self._gathered(tensor)
        total = torch.empty_like(found[0]) if found else torch.empty(tensor.shape, dtype=tensor.dtype)
        if found:
            fold(found, total)
        tensor.detach().copy_(self.broadcast_(total))
        return tensor

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, at the first; nothing elsewhere."""
        own = tensor.detach().cpu().contiguous()
        if self.index:
            self.send(own, 0, _OF_ALL)  # nobody changes it before the answer is here
            return []
        found = [own, *(torch.empty_like(own) for _ in self.ranks[1:])]
        for index, room in enumerate(found[1:], start=1):
            self.receive(room, index, _OF_ALL).wait()
        return found

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self.all_reduce_(torch.cat([part.reshape(-1) for part in parts]))
        mine = flat.split([part.numel() for part in parts])[self.index]
        return mine.view(parts[self.index].shape).clone()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [tensor if index == self.index else torch.empty_like(tensor) for index in range(self.size)]
        self.all_gather_(parts)
        return parts

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        others = [index for index in range(self.size) if index != self.index]
        own = slices[self.index].detach().to("cpu", copy=True)  # so that nobody need wait until it has left
        for index in others:
            self.send(own, index, _OF_ALL)
        for index in others:  # all are under way at once
            room = torch.empty(slices[index].shape, dtype=slices[index].dtype)
            self.receive(room, index, _OF_ALL).wait()
            slices[index].detach().copy_(room)

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        if self.index == index:
            others = (other for other in range(self.size) if other != index)
            content = tensor.detach().to("cpu", copy=True)  # so that nobody need wait until it has left
            for other in others:
                self.send(content, other, _OF_ALL)
            return tensor
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.receive(room, index, _OF_ALL).wait()
        tensor.detach().copy_(room)
        return tensor

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        return self._mail.send(tensor.detach(), self.ranks[to], self.ranks, tag)

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        return self._mail.receive(room.detach(), self.ranks[sender], self.ranks, tag)

    def take(self, like: torch.Tensor, sender: int, tag: int = 0) -> torch.Tensor:
        """What `receive` gives, in memory of its own: nothing is copied."""
        return self._mail.take_as(self.ranks[sender], self.ranks, tag, like)

    def has_come(self, sender: int, tag: int) -> bool:
        """Whether `take` would return at once, as far as `pump` has looked."""
        return self._mail.has(self.ranks[sender], self.ranks, tag)

    def has_room(self, to: int) -> bool:
        """Whether `send` would return at once."""
        return self._mail.has_room(self.ranks[to])

    def pump(self) -> None:
        self._mail.pump()

    def split(self, rows: Rows) -> Group:
        rank = self.ranks[self.index]
        row = next(row for row in rows if rank in row)
        if len(row) == 1:
            return LoneGroup(rank)
        return self if len(rows) == 1 else SocketGroup(self._mail.transport, row, mail=self._mail)

    def close(self) -> None:
        if self._owns_transport:
            self._mail.transport.close()
