"""A group over our own transport: authenticated, and every byte checked. Sums are made at the first worker."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.comm.codec import Message
from shoal.comm.group.base import Fold, Group, Rows, Transfer, as_bytes, largest, sum_in_order
from shoal.comm.group.lone import LoneGroup
from shoal.comm.transport import Transport
from shoal.errors import CommTimeout, ProtocolError

PATIENCE_S = 300.0
"""For a peer that is busy; one that died is noticed at once."""
_KIND = "group.tensor"
_FRAME_BYTES = 16 << 20
_MOST_UNDER_WAY = 256 << 20
"""Bytes that a worker may have sent without knowing that they arrived."""
_LOOKS_UP_S = 0.1
_OF_ALL = -1
"""The tag of what everybody says together."""


class _Desk:
    """What has come over a transport, for all groups that use it."""

    def __init__(self, transport: Transport, on_idle: Callable[[], None] | None) -> None:
        self.transport = transport
        self._on_idle = on_idle
        self._arrived: defaultdict[tuple[int, tuple[int, ...], int], deque[torch.Tensor]] = defaultdict(deque)
        self._under_way = 0

    def send(self, rank: int, content: torch.Tensor, ranks: tuple[int, ...], tag: int) -> None:
        """From where it lies."""
        frames = list(content.split(_FRAME_BYTES)) if content.numel() else []
        self._under_way += content.numel()
        if self._under_way > _MOST_UNDER_WAY:
            self.flush()
        self.transport.send(rank, Message(_KIND, {"ranks": list(ranks), "tag": tag}, frames))

    def flush(self) -> None:
        """Until all that was sent has arrived."""
        self.transport.flush(PATIENCE_S)
        self._under_way = 0

    def take(self, rank: int, ranks: tuple[int, ...], tag: int) -> torch.Tensor:
        """What the next message of this sender in this group has, under this tag; others are kept."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._arrived[rank, ranks, tag]:
            try:
                sender, message = self.transport.receive(_LOOKS_UP_S, awaited=rank)
            except CommTimeout:
                if time.monotonic() > deadline:
                    raise
                if self._on_idle is not None:
                    self._on_idle()
                continue
            frames = [frame for frame in message.frames if isinstance(frame, torch.Tensor)]
            content = torch.cat(frames) if frames else torch.empty(0, dtype=torch.uint8)
            self._arrived[sender, tuple(message.fields["ranks"]), message.fields["tag"]].append(content)
        return self._arrived[rank, ranks, tag].popleft()


class SocketGroup(Group):
    """Workers with a transport each; all of its peers, or a row of them."""

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        *,
        on_idle: Callable[[], None] | None = None,
        desk: _Desk | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(transport.rank)
        self._desk = desk or _Desk(transport, on_idle)
        self._owns_transport = desk is None

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fold_(tensor, sum_in_order)

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
        for index, one in enumerate(slices):
            self.broadcast_(one, index)

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
        self._desk.send(self.ranks[to], as_bytes(tensor.detach().contiguous()), self.ranks, tag)
        return _SocketSending(self._desk)

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        return _SocketReceiving(self._desk, self.ranks[sender], self.ranks, tag, as_bytes(room.detach()))

    def split(self, rows: Rows) -> Group:
        rank = self.ranks[self.index]
        row = next(row for row in rows if rank in row)
        if len(row) == 1:
            return LoneGroup(rank)
        return self if len(rows) == 1 else SocketGroup(self._desk.transport, row, desk=self._desk)

    def close(self) -> None:
        if self._owns_transport:
            self._desk.transport.close()


@dataclass(frozen=True)
class _SocketSending:
    desk: _Desk

    def wait(self) -> None:
        self.desk.flush()


@dataclass(frozen=True)
class _SocketReceiving:
    desk: _Desk
    rank: int
    ranks: tuple[int, ...]
    tag: int
    room: torch.Tensor

    def wait(self) -> None:
        content = self.desk.take(self.rank, self.ranks, self.tag)
        if content.numel() != self.room.numel():
            raise ProtocolError(
                f"Worker {self.rank} sent {content.numel()} bytes where {self.room.numel()} were awaited.",
                peer=str(self.rank),
            )
        self.room.copy_(content)
