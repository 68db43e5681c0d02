"""Where a server finds what a push brings: in shared memory, or in the message's frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression import Compression
from shoal.errors import ProtocolError
from shoal.ps.messages import Push
from shoal.spec.served_footprint import BUFFERS_PER_SLOT
from shoal.strategies.ps.memory import ServedMemory
from shoal.strategies.ps.parcelling import blocks, parcels, unwrap, wrap


class Bulk(Protocol):
    """The gradients of one shard, push by push."""

    def fits(self, push: Push) -> bool:
        """Whether the push brings what this shard consists of."""

    def gradients(self, push: Push) -> Sequence[torch.Tensor]:
        """One flat tensor for each of the shard's blocks."""

    def touched(self, push: Push) -> Any:
        """By parameter: whether there is a gradient."""

    def moved(self, push: Push) -> torch.Tensor:
        """The moving buffers that the worker left, as bytes; empty for shards that do not keep them."""


class SharedBulk:
    """Workers leave their gradients in the host's segment; a push only says in which buffer."""

    def __init__(self, memory: ServedMemory, shard: int) -> None:
        self._memory = memory
        self._shard = shard
        self._views: dict[int, list[torch.Tensor]] = {}

    def fits(self, push: Push) -> bool:
        return not push.frames and 0 <= push.buffer < self._memory.num_buffers

    def gradients(self, push: Push) -> Sequence[torch.Tensor]:
        if push.buffer not in self._views:
            self._views[push.buffer] = blocks(self._memory, self._shard, f"gradients/{push.buffer}")
        return self._views[push.buffer]

    def touched(self, push: Push) -> Any:
        return self._memory.touched(push.buffer).numpy()

    def moved(self, push: Push) -> torch.Tensor:
        return self._memory.moved(push.buffer)


class FramedBulk(SharedBulk):
    """Gradients come as frames of the push; they are unpacked into buffers of this process's own."""

    def __init__(self, memory: ServedMemory, shard: int, compression: Compression) -> None:
        super().__init__(memory, shard)
        self._compression = compression
        self._unpacked: dict[int, tuple[int, int]] = {}
        """By buffer: origin and sequence of the push that it holds."""

    def fits(self, push: Push) -> bool:
        if not 0 <= push.buffer < self._memory.num_buffers:
            return False
        try:
            self._unpack(push)
        except ProtocolError:
            return False
        return True

    def gradients(self, push: Push) -> Sequence[torch.Tensor]:
        if self._unpacked.get(push.buffer) != (push.origin, push.sequence):
            self._unpack(push)
        return super().gradients(push)

    def _unpack(self, push: Push) -> None:
        if len(push.frames) < 2:
            raise ProtocolError("A push brings no gradient.")
        *gradients, touched, moved = push.frames
        flags = [(touched, self._memory.touched(push.buffer)), (moved, self._memory.moved(push.buffer))]
        for frame, target in flags:
            if not isinstance(frame, torch.Tensor) or (frame.dtype, frame.shape) != (target.dtype, target.shape):
                raise ProtocolError("A push's flags or buffers do not fit the model.")
        self._unpacked.pop(push.buffer, None)
        if gradients or not push.is_spoilt:
            targets = parcels(self._memory, self._shard, f"gradients/{push.buffer}", self._compression)
            unwrap(self._compression, gradients, targets)
        for frame, target in flags:
            assert isinstance(frame, torch.Tensor)
            target.copy_(frame)
        self._unpacked[push.buffer] = (push.origin, push.sequence)


def frames_of(memory: ServedMemory, shard: int, buffer: int, compression: Compression | None) -> tuple[Frame, ...]:
    """What a push of this buffer carries for one shard; without `compression`, no gradient."""
    flags = memory.touched(buffer), memory.moved(buffer)
    if compression is None:
        return flags
    tensors = parcels(memory, shard, f"gradients/{buffer}", compression)
    # Feedback is kept by slot, whichever of its buffers is in turn.
    return (*wrap(compression, f"{buffer // BUFFERS_PER_SLOT}/{shard}", tensors), *flags)
