"""The update of a model that lies in a GPU's memory: all of it at once, by one place, in the order of one stream.

Before it begins, all that it changes is copied aside, the *shadow*, and then a flag on the GPU says for which
step: both are stored by the GPU in that order, so a death at any moment leaves the model as it was, or a whole
shadow of it. Gradients stay until the step is committed. Whoever takes over puts the shadow back and makes the
update again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.arena.grid import ALIGN
from shoal.model.replica import Replica
from shoal.spec.device_footprint import FLAG
from shoal.strategies.data.device_shared import DeviceState
from shoal.strategies.data.update import ChunkedUpdate, ChunkUpdate


class Aside:
    """Tensors of one memory, and rooms in it where they are copied to."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._used = 0
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room_for(self, live: torch.Tensor) -> torch.Tensor:
        """One more tensor's."""
        start, self._used = self._used, self._used + -(-live.nbytes // ALIGN) * ALIGN
        room = self._memory[start : start + live.nbytes].view(live.dtype)
        self._pairs.append((live, room))
        return room

    def save(self) -> None:
        """Copy all of them aside."""
        for live, room in self._pairs:
            room.copy_(live)

    def restore(self) -> None:
        """Copy all of them back."""
        for live, room in self._pairs:
            live.copy_(room)


@dataclass(frozen=True)
class ShadowWorkspace:
    """What one chunk is updated with; its old values have rooms of their own."""

    sum: torch.Tensor
    device: Aside
    host: Aside

    def rooms(self, live: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        values = [one for one in live if one.dtype == dtype]
        flags, *scalars = [one for one in live if one.dtype != dtype]
        found = [self.device.room_for(one) for one in values] + [self.host.room_for(flags)]
        return found + [
            memory.room_for(one) for memory, one in zip((self.host, self.device), scalars, strict=False)
        ]


class DeviceUpdate(ChunkedUpdate):
    """The whole model. Nothing here waits for the GPU but `recover`."""

    def __init__(self, shared: DeviceState, replica: Replica, place: int, *, journal: bool) -> None:
        super().__init__(shared, replica, journal=journal)
        self._clip_norm = shared.setting.clip_norm
        self._progress = shared.marks.progress[place]
        """The last step for which what the host keeps was copied aside."""
        self._done = shared.marks.updated[place]
        memory, segment = shared.memory, shared.segment
        self._flag = memory.tensor(FLAG, torch.int32, count=1)
        self._device = Aside(memory.tensor("shadow", torch.uint8))
        self._beside = None if shared.device == "cpu" else torch.cuda.Stream(shared.device)
        self._is_prepared = False
        """Whether the shadow of the next update was asked for."""
        self._host = Aside(segment.tensor("undo", torch.uint8))
        first_piece = 0
        for chunk in shared.grid.chunks:
            room = torch.empty(chunk.nbytes, dtype=torch.uint8, device=shared.device)
            workspace = ShadowWorkspace(room, self._device, self._host)
            self._chunks.append(ChunkUpdate(shared, replica, chunk, first_piece, workspace))
            first_piece += len(chunk.pieces)

    def recover(self) -> None:
        """Put back what a process that is gone has changed of a step that was not committed."""
        if not self._journal:
            return
        counters = self._shared.counters
        done = counters[self._done]
        if counters[self._progress] > done:
            self._host.restore()
        if int(self._flag) > done:
            self._device.restore()
            self._is_prepared = False
            self._shared.setting.company.report(
                "A model that its worker left half updated was put back and is updated again."
            )
        for chunk in self._chunks:
            chunk.bind_state()

    def prepare(self) -> None:
        """Ask for the shadow of the next update, beside what is computed until then: nobody changes the model."""
        if not self._journal or self._is_prepared:
            return
        self._is_prepared = True
        if self._beside is None:
            self._device.save()
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._device.save()

    def run(self, step: int, scale: float, touched: Any) -> None:
        """Ask for the update of this step. All slots' gradients are there, or asked for before on this stream."""
        self._adopt_settings()
        for chunk in self._chunks:
            chunk.reduce(scale, touched)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        if self._journal:
            self._copy_aside(step)
        for chunk in self._chunks:
            chunk.apply(touched)

    def _clip(self, clip_norm: float) -> None:
        """By the norm of the whole gradient, as torch does; what no slot has touched is zero in it."""
        norms = [torch.linalg.vector_norm(chunk.sum).double() for chunk in self._chunks]
        factor = (clip_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for chunk in self._chunks:
            chunk.sum.mul_(factor.to(chunk.sum.dtype))

    def _copy_aside(self, step: int) -> None:
        self._host.save()
        self._shared.counters[self._progress] = step
        self.prepare()
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        self._flag.fill_(step)
        self._is_prepared = False
