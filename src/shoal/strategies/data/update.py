"""Reduce and update the model chunk by chunk, so that a killed process leaves at most one chunk torn.

Before a chunk is touched its old values go into the journal; `progress` says whether the process was inside.
Whoever takes over puts the torn chunk back and goes on from there: gradients stay as they are until all chunks
of all workers are done, so the same operations give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.arena import Chunk
from shoal.model.optimizer.chunk import ChunkOptimizer
from shoal.model.optimizer.kinds import settings_of
from shoal.model.replica import Replica
from shoal.step.clipping import ChunkNorms
from shoal.strategies.data.shared import SharedState, cut_of_grid


class Workspace(Protocol):
    """What a chunk is updated with."""

    @property
    def sum(self) -> torch.Tensor:
        """Private bytes for the summed gradient."""

    def rooms(self, live: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Where the old values of all that `apply` changes go; `dtype`: that of the chunk's elements."""


@dataclass(frozen=True)
class TurnWorkspace:
    """Bytes that a place's chunks use in turn."""

    sum: torch.Tensor
    undo: torch.Tensor
    """Shared: the journal's values, and below its flags and scalars."""
    undo_scalars: torch.Tensor

    def rooms(self, live: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        room, small, saved = self.undo.view(dtype), self.undo_scalars, []
        for one in live:
            if one.dtype == dtype:
                saved.append(room[: one.numel()])
                room = room[one.numel() :]
            else:
                saved.append(small[: one.numel()])
                small = small[one.numel() :]
        return saved


class ChunkUpdate:
    """One chunk: its parts of the slots' gradients, their sum, and the optimizer's step on it."""

    def __init__(
        self, shared: SharedState, replica: Replica, chunk: Chunk, first_piece: int, workspace: Workspace
    ) -> None:
        self._optimizer = ChunkOptimizer(shared.home, chunk, first_piece, replica.optimizer, shared.params)
        dtype = self._optimizer.dtype
        self._numbers = shared.summed_slots
        self._slots = [shared.home.flat(f"gradients/{slot}", chunk, dtype) for slot in self._numbers]
        self.sum = workspace.sum.view(dtype)[: self._optimizer.values.numel()]
        self._gradients = [self.sum[span] for span in self._optimizer.spans]
        self._live = self._optimizer.live
        self._saved = workspace.rooms(self._live, dtype)
        self._all_have_gradients = False

    def adopt_settings(self, settings: list[dict[str, Any]]) -> None:
        """Take over the learning rate and the like from the user's groups."""
        self._optimizer.adopt_settings(settings)

    def reduce(self, scale: float, touched: Any, given: torch.Tensor | None = None) -> torch.Tensor:
        """Sum the slots' gradients in slot order, and scale. `touched` is None where every slot has every
        gradient; `given`: the sum, where other hosts have added to it.

        The order is part of the result, for sums of floats depend on it: so one process with these slots, servers
        (`ShardStore`), several hosts (`HostChain`) and whoever redoes a torn chunk get the same bits. So is where
        a sum begins: with the first gradient or, where some are missing, at zero, which makes 0.0 of -0.0.
        """
        if given is not None:
            return torch.mul(given, scale, out=self.sum)
        self.add_slots(self.sum, touched, begins=True)
        if scale != 1.0:
            self.sum.mul_(scale)
        return self.sum

    @property
    def params(self) -> frozenset[int]:
        """The numbers of the parameters that it has a part of."""
        return frozenset(self._optimizer.params)

    @property
    def only_slot(self) -> torch.Tensor:
        """The gradient of this host's slot, where it has one."""
        (gradient,) = self._slots
        return gradient

    def add_slots(self, total: torch.Tensor, touched: Any, *, begins: bool) -> None:
        """Add the gradients of this host's slots, one by one, to the sum of those before them; `begins`: there are
        none."""
        if touched is not None:
            if begins:
                total.zero_()
            for span, param in zip(self._optimizer.spans, self._optimizer.params, strict=True):
                for slot, gradient in zip(self._numbers, self._slots, strict=True):
                    if touched[slot, param]:
                        total[span].add_(gradient[span])
            return
        gradients = self._slots
        if begins and len(gradients) > 1:
            torch.add(gradients[0], gradients[1], out=total)
            gradients = gradients[2:]
        elif begins:
            total.copy_(gradients[0])
            gradients = []
        for gradient in gradients:
            total.add_(gradient)

    def apply(self, touched: Any) -> None:
        """Let the optimizer take its step on every piece that got a gradient."""
        if touched is not None or not self._all_have_gradients:
            self._optimizer.aim(
                [
                    gradient if touched is None or touched[:, param].any() else None
                    for gradient, param in zip(self._gradients, self._optimizer.params, strict=True)
                ]
            )
        self._all_have_gradients = self._optimizer.step() and touched is None

    def save(self) -> None:
        """Copy all that `apply` changes into the journal. Bits, not differences: what is put back is what was."""
        torch._foreach_copy_(self._saved, self._live)

    def restore(self) -> None:
        """Put the journal's values back."""
        torch._foreach_copy_(self._live, self._saved)
        self._optimizer.bind_state()

    def bind_state(self) -> None:
        """Point the optimizer at what lies there now."""
        self._optimizer.bind_state()


class ChunkedUpdate:
    """Chunks that follow the settings of the user's optimizer."""

    def __init__(self, shared: SharedState, replica: Replica, *, journal: bool) -> None:
        self._shared = shared
        self._replica = replica
        self._journal = journal
        self._chunks: list[ChunkUpdate] = []
        self._settings = [settings_of(group) for group in replica.optimizer.param_groups]

    def _adopt_settings(self) -> None:
        current = [settings_of(group) for group in self._replica.optimizer.param_groups]
        if current != self._settings:
            self._settings = current
            for chunk in self._chunks:
                chunk.adopt_settings(current)


class SlicedUpdate(ChunkedUpdate):
    """One place's chunks, in order."""

    def __init__(self, shared: SharedState, replica: Replica, place: int, *, journal: bool) -> None:
        super().__init__(shared, replica, journal=journal)
        grid = shared.grid
        self._owned = owned = grid.owned_by(place, shared.setting.world.world_size)
        self.totals: Callable[[int], torch.Tensor] | None = None
        """By chunk: the sums of this step, where other hosts have slots, too."""
        first_piece = sum(len(chunk.pieces) for chunk in grid.chunks[: owned.start])
        workspace = TurnWorkspace(
            torch.empty(cut_of_grid(grid).largest_chunk, dtype=torch.uint8),
            shared.segment.tensor(f"undo/{place}", torch.uint8),
            shared.segment.tensor(f"undo-scalars/{place}", torch.uint8),
        )
        for number in owned:
            self._chunks.append(ChunkUpdate(shared, replica, grid.chunks[number], first_piece, workspace))
            first_piece += len(grid.chunks[number].pieces)
        self._norms = [
            ChunkNorms(shared.units, grid.chunks[number])
            for number in owned
            if shared.setting.clip_norm is not None
        ]
        self._progress = shared.marks.progress[place]

    def begin_step(self) -> None:
        """Gradients of another step come: none of the chunks has them."""
        self._shared.counters[self._progress] = 0

    def measure(self, scale: float, touched: Any) -> None:
        """Write the squared norms of each chunk's gradient where all can read them."""
        for number, norms in enumerate(self._norms):
            self._shared.norms[norms.numbers] = norms.measure(self._reduced(number, scale, touched))

    def run(self, scale: float, touched: Any) -> None:
        """Update all chunks that are not yet done in this step."""
        self._adopt_settings()
        counters, progress = self._shared.counters, self._progress
        done, torn = divmod(counters[progress], 2)
        if torn:
            assert self._journal, "nobody may take over a step without a journal"
            self._chunks[done].restore()
            counters[progress] = 2 * done
            self._shared.setting.company.report(
                "A chunk that its worker left half updated was put back and is done again."
            )
        for number in range(done, len(self._chunks)):
            chunk = self._chunks[number]
            self._reduced(number, scale, touched)
            if self._journal:
                chunk.save()
            counters[progress] = 2 * number + 1
            chunk.apply(touched)
            counters[progress] = 2 * number + 2

    def owned(self) -> Iterator[tuple[int, ChunkUpdate]]:
        """This place's chunks by their numbers in the model."""
        return zip(self._owned, self._chunks, strict=True)

    def _reduced(self, number: int, scale: float, touched: Any) -> torch.Tensor:
        given = None if self.totals is None else self.totals(self._owned[number])
        return self._chunks[number].reduce(scale, touched, given)
