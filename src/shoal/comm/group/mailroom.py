"""Tensors from one process to another over a transport, by group and tag."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from shoal.arena.tensors import as_bytes
from shoal.comm.codec import Message
from shoal.comm.group.base import Transfer
from shoal.comm.transport import Transport
from shoal.errors import CommError, CommTimeout, ProtocolError

PATIENCE_S = 300.0
"""For a peer that is busy; one that died is noticed at once."""
_KIND = "group.tensor"
_PIECE_BYTES = 2 << 20
"""Of a message. What stays unacknowledged is sent again: over a slow link that would be a large message, whole,
before it could have arrived."""
_MOST_BYTES, _MOST_MESSAGES = 256 << 20, 128
"""That a worker may have sent to another without knowing that they arrived; a transport would wait with more
messages, and nobody could leave it."""
_LOOKS_UP_S, _LOOKS_UP_SOON_S = 0.1, 0.005


class Mailroom:
    """What comes over a transport and goes, for all groups that use it. Who waits here looks up now and then."""

    def __init__(self, transport: Transport, on_idle: Callable[[], None] | None) -> None:
        self.transport = transport
        self._on_idle = on_idle
        self._arrived: defaultdict[tuple[int, tuple[int, ...], int], deque[torch.Tensor]] = defaultdict(deque)
        self._begun: defaultdict[tuple[int, tuple[int, ...], int], list[torch.Tensor]] = defaultdict(list)
        """Likewise the pieces of one that is not all there yet."""
        self._looked_up_at = time.monotonic()
        self._sizes: defaultdict[int, deque[int]] = defaultdict(deque)
        """By receiver: the bytes of each message that may not have arrived."""

    def send(self, tensor: torch.Tensor, rank: int, ranks: tuple[int, ...], tag: int) -> Transfer:
        """Put a tensor on its way, from where it lies."""
        pieces = as_bytes(tensor.contiguous()).split(_PIECE_BYTES)
        for left in range(len(pieces) - 1, -1, -1):
            piece = pieces[-1 - left]
            while not self.has_room(rank):
                # Until some have arrived, not all: whoever has to say so may be waiting for this worker elsewhere.
                self._patiently(lambda: self._keep_next(_LOOKS_UP_SOON_S), is_enough=lambda: self.has_room(rank))
            self._sizes[rank].append(piece.numel())
            fields = {"ranks": list(ranks), "tag": tag, "left": left}
            self.transport.send(rank, Message(_KIND, fields, [piece] if piece.numel() else []))
        return _SocketSending(self)

    def receive(self, room: torch.Tensor, rank: int, ranks: tuple[int, ...], tag: int) -> Transfer:
        """The next tensor of this sender in this group under this tag, into this room."""
        return _SocketReceiving(self, rank, ranks, tag, as_bytes(room))

    def take_as(self, rank: int, ranks: tuple[int, ...], tag: int, like: torch.Tensor) -> torch.Tensor:
        """The next tensor of this sender in this group under this tag, where it arrived."""
        content = self.take(rank, ranks, tag)
        if content.numel() != like.nbytes:
            raise _other_size(rank, content, like.nbytes)
        return content.view(like.dtype).view(like.shape)

    def flush(self) -> None:
        """Until all that was sent has arrived."""
        self._patiently(lambda: self.transport.flush(_LOOKS_UP_S))

    def take(self, rank: int, ranks: tuple[int, ...], tag: int) -> torch.Tensor:
        """The bytes of the next message of this sender in this group under this tag; others are kept."""
        while not self._arrived[rank, ranks, tag]:
            self._patiently(lambda: self._keep_next(_LOOKS_UP_S, rank))
        return self._arrived[rank, ranks, tag].popleft()

    def has(self, rank: int, ranks: tuple[int, ...], tag: int) -> bool:
        """Whether a message of this sender in this group under this tag has been kept."""
        return bool(self._arrived.get((rank, ranks, tag)))

    def pump(self) -> None:
        """Keep what has come: a worker that waits elsewhere must still say that it arrived."""
        with suppress(CommError):  # Nothing has come; who waits for a peer that is gone will learn it.
            while True:
                self._keep_next(0.0)

    def has_room(self, rank: int) -> bool:
        """Whether another message may be sent there before one has arrived."""
        sizes, count = self._sizes[rank], self.transport.under_way(rank)
        while len(sizes) > count:
            sizes.popleft()
        return count < _MOST_MESSAGES and sum(sizes) <= _MOST_BYTES

    def _keep_next(self, timeout_s: float, awaited: int | None = None) -> None:
        sender, message = self.transport.receive(timeout_s, awaited=awaited)
        key = sender, tuple(message.fields["ranks"]), message.fields["tag"]
        pieces = self._begun[key]
        pieces += [frame for frame in message.frames if isinstance(frame, torch.Tensor)]
        if message.fields["left"]:
            return
        del self._begun[key]
        content = torch.cat(pieces) if len(pieces) > 1 else (*pieces, torch.empty(0, dtype=torch.uint8))[0]
        self._arrived[key].append(content)

    def _patiently(self, act: Callable[[], None], is_enough: Callable[[], bool] = lambda: False) -> None:
        """Do what may take its time, looking up now and then; it is over, too, once that is enough."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                act()
                if time.monotonic() - self._looked_up_at >= _LOOKS_UP_S:
                    self._look_up()  # over a slow link there may be something new each time, and for long
                return
            except CommTimeout:
                if is_enough():
                    return
                if time.monotonic() > deadline:
                    raise
            self._look_up()

    def _look_up(self) -> None:
        self._looked_up_at = time.monotonic()
        if self._on_idle is not None:
            self._on_idle()


@dataclass(frozen=True)
class _SocketSending:
    mail: Mailroom

    def wait(self) -> None:
        self.mail.flush()


@dataclass(frozen=True)
class _SocketReceiving:
    mail: Mailroom
    rank: int
    ranks: tuple[int, ...]
    tag: int
    room: torch.Tensor

    def wait(self) -> None:
        content = self.mail.take(self.rank, self.ranks, self.tag)
        if content.numel() != self.room.numel():
            raise _other_size(self.rank, content, self.room.numel())
        self.room.copy_(content)


def _other_size(rank: int, content: torch.Tensor, awaited: int) -> ProtocolError:
    return ProtocolError(
        f"Worker {rank} sent {content.numel()} bytes where {awaited} were awaited.", peer=str(rank)
    )
