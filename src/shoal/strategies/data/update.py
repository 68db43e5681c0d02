"""Reduce and update the model chunk by chunk, so that a killed process leaves at most one chunk torn.

Before a chunk is touched its old values go into the journal; `progress` says whether the process was inside.
Whoever takes over puts the torn chunk back and goes on from there: gradients stay as they are until all chunks
of all workers are done, so the same operations give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.arena import Chunk
from shoal.strategies.data.shared import SCALAR_BYTES, SharedState, largest_chunk
from shoal.strategies.optimizers import rebuild, settings_of
from shoal.strategies.replica import Replica


@dataclass(frozen=True)
class Workspace:
    """Bytes that a worker's chunks use in turn."""

    sum: torch.Tensor
    """Private: the summed gradient."""
    undo: torch.Tensor
    """Shared: the journal's values, and below its flags and scalars."""
    undo_scalars: torch.Tensor


class ChunkUpdate:
    """One chunk: its parts of the gradients, and an optimizer of the user's class over its pieces.

    A step visits dozens of chunks, so everything that can be is cut to size beforehand.
    """

    def __init__(
        self, shared: SharedState, replica: Replica, chunk: Chunk, first_piece: int, workspace: Workspace
    ) -> None:
        self._shared = shared
        self._first_piece = first_piece
        self._dtype = shared.params[chunk.pieces[0].param].dtype
        self._chunk = chunk
        self.params = [piece.param for piece in chunk.pieces]
        values = self._flat("params")
        self._mirrored = {key: self._flat(f"state/{key}") for key in shared.schema.mirrored}
        self._slots = [self._flat(f"gradients/{slot}") for slot in range(shared.setting.slots)]
        self._spans = [self._span(piece.offset, piece.stop - piece.start) for piece in chunk.pieces]
        self._pieces = [nn.Parameter(values[span], requires_grad=True) for span in self._spans]
        self._values = values
        self._scalar_bytes = shared.segment.tensor(
            "scalars",
            torch.uint8,
            offset=first_piece * len(shared.schema.scalars) * SCALAR_BYTES,
            count=len(chunk.pieces) * len(shared.schema.scalars) * SCALAR_BYTES,
        )
        self._started = shared.started[first_piece : first_piece + len(chunk.pieces)]
        self._sum = workspace.sum.view(self._dtype)[: values.numel()]
        self._gradients = [self._sum[span] for span in self._spans]
        self._live, self._saved = self._journal_pairs(workspace)
        self._all_have_gradients = False
        self._build_optimizer(replica)
        self._bind_state()

    def _journal_pairs(self, workspace: Workspace) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All that `apply` changes, and where its old values go."""
        live = [self._values, *self._mirrored.values()]
        room, count, flags = workspace.undo.view(self._dtype), self._values.numel(), len(self._started)
        saved = [room[number * count : (number + 1) * count] for number in range(len(live))]
        live.append(self._started)
        saved.append(workspace.undo_scalars[:flags])
        if self._scalar_bytes.numel():
            live.append(self._scalar_bytes)
            saved.append(workspace.undo_scalars[flags : flags + self._scalar_bytes.numel()])
        return live, saved

    def _flat(self, region: str) -> torch.Tensor:
        count = self._chunk.nbytes // self._dtype.itemsize
        return self._shared.segment.tensor(region, self._dtype, offset=self._chunk.offset, count=count)

    def _span(self, offset: int, count: int) -> slice:
        start = (offset - self._chunk.offset) // self._dtype.itemsize
        return slice(start, start + count)

    def _build_optimizer(self, replica: Replica) -> None:
        group_of = {
            id(p): number for number, group in enumerate(replica.optimizer.param_groups) for p in group["params"]
        }
        numbers = [group_of[id(self._shared.params[param])] for param in self.params]
        self._groups = sorted(set(numbers))
        groups: list[dict[str, Any]] = [
            {
                **settings_of(replica.optimizer.param_groups[number]),
                "params": [piece for piece, own in zip(self._pieces, numbers, strict=True) if own == number],
            }
            for number in self._groups
        ]
        self._optimizer = rebuild(replica.optimizer, groups)

    def _bind_state(self) -> None:
        """Point the optimizer at the shared state of every piece that has some."""
        self._new = []
        for number, piece in enumerate(self._pieces):
            if self._started[number]:
                self._optimizer.state[piece] = self._shared_state(number)
            else:
                self._new.append(number)

    def _shared_state(self, number: int) -> dict[str, torch.Tensor]:
        state = {key: flat[self._spans[number]] for key, flat in self._mirrored.items()}
        for column, (key, dtype) in enumerate(self._shared.schema.scalars):
            state[key] = self._shared.scalar(self._first_piece + number, column, dtype)
        return state

    def adopt_settings(self, settings: list[dict[str, Any]]) -> None:
        """Take over the learning rate and the like from the user's groups."""
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings[number])

    def reduce(self, scale: float, touched: Any) -> torch.Tensor:
        """Sum the slots' gradients in slot order. `touched` is None where every slot has every gradient."""
        total = self._sum
        if touched is None:
            if len(self._slots) == 1:
                total.copy_(self._slots[0])
            else:
                torch.add(self._slots[0], self._slots[1], out=total)
                for gradient in self._slots[2:]:
                    total.add_(gradient)
        else:
            total.zero_()
            for span, param in zip(self._spans, self.params, strict=True):
                for slot, gradient in enumerate(self._slots):
                    if touched[slot, param]:
                        total[span].add_(gradient[span])
        if scale != 1.0:
            total.mul_(scale)
        return total

    def apply(self, touched: Any) -> None:
        """Let the optimizer take its step on every piece that got a gradient."""
        if touched is not None or not self._all_have_gradients:
            for piece, gradient, param in zip(self._pieces, self._gradients, self.params, strict=True):
                piece.grad = gradient if touched is None or touched[:, param].any() else None
            self._all_have_gradients = touched is None
        if not self._new:
            self._optimizer.step()
        else:
            self._first_step()

    def _first_step(self) -> None:
        """A piece's first step makes its state: let the optimizer do so, then move the state into the arena.

        Pieces that already have state go apart, because fused kernels take either all or none as new.
        """
        gradients = [piece.grad for piece in self._pieces]
        fresh = [number for number in self._new if gradients[number] is not None]
        older = [number for number in range(len(self._pieces)) if number not in self._new]
        for chosen in (older, fresh):
            for number, piece in enumerate(self._pieces):
                piece.grad = gradients[number] if number in chosen else None
            if any(gradients[number] is not None for number in chosen):
                self._optimizer.step()
        for number in fresh:
            own = self._optimizer.state[self._pieces[number]]
            for key, shared in self._shared_state(number).items():
                if own.get(key) is not None:
                    shared.copy_(own[key])
                    own[key] = shared
            self._started[number] = 1
        self._new = [number for number in self._new if number not in fresh]
        self._all_have_gradients = False

    def save(self) -> None:
        """Copy all that `apply` changes into the journal."""
        torch._foreach_copy_(self._saved, self._live)

    def restore(self) -> None:
        """Put the journal's values back."""
        torch._foreach_copy_(self._live, self._saved)
        self._optimizer.state.clear()
        self._bind_state()


class SlicedUpdate:
    """One worker's chunks, in order."""

    def __init__(self, shared: SharedState, replica: Replica, global_rank: int, *, journal: bool) -> None:
        self._shared = shared
        self._replica = replica
        self._journal = journal
        grid = shared.grid
        owned = grid.owned_by(global_rank, shared.setting.world.world_size)
        first_piece = sum(len(chunk.pieces) for chunk in grid.chunks[: owned.start])
        self._numbers = owned
        self._chunks: list[ChunkUpdate] = []
        workspace = Workspace(
            torch.empty(largest_chunk(grid), dtype=torch.uint8),
            shared.segment.tensor(f"undo/{global_rank}", torch.uint8),
            shared.segment.tensor(f"undo-scalars/{global_rank}", torch.uint8),
        )
        for number in owned:
            self._chunks.append(ChunkUpdate(shared, replica, grid.chunks[number], first_piece, workspace))
            first_piece += len(grid.chunks[number].pieces)
        self._progress = shared.marks.progress[global_rank]
        self._settings = [settings_of(group) for group in replica.optimizer.param_groups]

    def measure(self, scale: float, touched: Any) -> None:
        """Write the squared norm of each chunk's gradient where all can read it."""
        for number, chunk in zip(self._numbers, self._chunks, strict=True):
            gradient = chunk.reduce(scale, touched)
            self._shared.norms[number] = float(torch.linalg.vector_norm(gradient)) ** 2

    def run(self, scale: float, touched: Any) -> None:
        """Update all chunks that are not yet done in this step."""
        self._adopt_settings()
        counters, progress = self._shared.counters, self._progress
        done, torn = divmod(counters[progress], 2)
        if torn:
            assert self._journal, "nobody may take over a step without a journal"
            self._chunks[done].restore()
            counters[progress] = 2 * done
            self._shared.setting.report(
                "A chunk that its worker left half updated was put back and is done again."
            )
        for number in range(done, len(self._chunks)):
            chunk = self._chunks[number]
            chunk.reduce(scale, touched)
            if self._journal:
                chunk.save()
            counters[progress] = 2 * number + 1
            chunk.apply(touched)
            counters[progress] = 2 * number + 2

    def _adopt_settings(self) -> None:
        current = [settings_of(group) for group in self._replica.optimizer.param_groups]
        if current != self._settings:
            self._settings = current
            for chunk in self._chunks:
                chunk.adopt_settings(current)
