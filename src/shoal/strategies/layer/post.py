"""Values from worker to worker over `comm/`: sent as soon as they are there, taken when they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from shoal.comm.codec import Message
from shoal.comm.transport import Transport
from shoal.errors import CommTimeout
from shoal.spec.cut_footprint import MOST_UNDER_WAY
from shoal.strategies.backend import PATIENCE
from shoal.strategies.base import Setting
from shoal.strategies.data.meeting import Meeting, listening_address
from shoal.strategies.layer.packing import pack, unpack

_KIND = "layer.value"
_FRAME_BYTES = 16 << 20
_LOOKS_UP_S = 0.1


class Post:
    """One worker's end. Every value has a tag, which its sender and its reader agree on; each is read once."""

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        *,
        device: str = "cpu",
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._device = device
        self._on_idle = on_idle
        self._arrived: dict[tuple[int, str], Any] = {}
        self._under_way = 0
        self._rounds = 0

    def send(self, peer: int, tag: str, value: Any) -> None:
        """Put a value on its way, and go on. It arrives as it is now, whatever becomes of its memory."""
        plain, tensors = pack(value)
        frames, entries = [], []
        for tensor in tensors:
            # A copy: a layer that works in place may change the original before it has left.
            flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
            parts = flat.split(max(1, _FRAME_BYTES // flat.element_size()))
            entries.append([list(tensor.shape), len(parts), tensor.requires_grad])
            frames.extend(parts)
            self._under_way += flat.numel() * flat.element_size()
        if self._under_way > MOST_UNDER_WAY:
            self._transport.flush(PATIENCE.total_seconds())
            self._under_way = 0
        fields = {"tag": tag, "value": plain, "tensors": entries}
        self._transport.send(peer, Message(_KIND, fields, frames))

    def take(self, peer: int, tag: str) -> Any:
        """The value that a peer sent under this tag; waits for it. Tensors that had a history begin a new one."""
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while (peer, tag) not in self._arrived:
            try:
                sender, message = self._transport.receive(_LOOKS_UP_S, awaited=peer)
            except CommTimeout:
                if time.monotonic() > deadline:
                    raise
                if self._on_idle is not None:
                    self._on_idle()
                continue
            self._arrived[sender, message.fields["tag"]] = self._open(message)
        return self._arrived.pop((peer, tag))

    def _open(self, message: Message) -> Any:
        frames, tensors = iter(message.frames), []
        for shape, count, has_history in message.fields["tensors"]:
            parts = [frame for frame in islice(frames, count) if isinstance(frame, torch.Tensor)]
            # A copy, also of one part: kernels round otherwise where memory is aligned otherwise.
            flat = torch.cat(parts)
            tensors.append(flat.view(shape).to(self._device).requires_grad_(has_history))
        return unpack(message.fields["value"], tensors)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all workers, in place, with the same bits everywhere. All call this in the same order."""
        tag = self._next_round("sum")
        if self.rank:
            self.send(0, tag, tensor)
            return tensor.copy_(self.take(0, tag))
        for peer in range(1, self.size):
            tensor.add_(self.take(peer, tag).to(tensor.device))
        for peer in range(1, self.size):
            self.send(peer, tag, tensor)
        return tensor

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Take the first worker's values."""
        tag = self._next_round("copy")
        if self.rank:
            tensor.copy_(self.take(0, tag))
        else:
            for peer in range(1, self.size):
                self.send(peer, tag, tensor)

    def share(self, value: Any) -> list[Any]:
        """What every worker has, by rank. All call this in the same order."""
        tag = self._next_round("share")
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self.send(peer, tag, value)
        found = {peer: self.take(peer, tag) for peer in others}
        return [found.get(peer, value) for peer in range(self.size)]

    def bring(self, value: Any, owner: int) -> Any:
        """What one worker has, at the first; None elsewhere. All call this in the same order.

        It is sent once the first worker asks for it, who so has one value at a time, however many are brought.
        """
        tag = self._next_round("bring")
        if owner == self.rank == 0:
            return value
        if self.rank == owner:
            self.take(0, f"{tag} asked")
            self.send(0, tag, value)
        if self.rank:
            return None
        self.send(owner, f"{tag} asked", None)
        return self.take(owner, tag)

    def _next_round(self, what: str) -> str:
        self._rounds += 1
        return f"{what} {self._rounds}"

    def close(self) -> None:
        """Leave the others."""
        self._transport.close()


def open_post(setting: Setting) -> Post:
    """Meet the other workers of this run."""
    from shoal.comm.zmq_transport import ZmqTransport

    world = setting.world
    meeting = Meeting(setting)
    transport = ZmqTransport(
        world.global_rank,
        key=meeting.agree_on_key(),
        address=listening_address(setting),
        generation=world.generation,
    )
    transport.connect(meeting.exchange_addresses(transport.address))
    return Post(transport, world.global_rank, world.world_size, device=world.device, on_idle=setting.on_idle)
