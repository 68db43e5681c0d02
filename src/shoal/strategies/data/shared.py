"""The job's state in the host's shared memory: where everything lies and how a replica is bound to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from shoal.arena import Grid, Segment, SharedMemory, make_grid
from shoal.arena.tensors import dense_stride, flat_of
from shoal.model.optimizer.chunk import Home, load_state
from shoal.model.optimizer.kinds import StateSchema
from shoal.model.optimizer.state import states_to_load
from shoal.model.replica import Replica
from shoal.spec.footprint import MemoryRegion
from shoal.spec.model_size import ChunkSize, CutSize
from shoal.step.clipping import Units, cut_bytes
from shoal.strategies.base import Setting

_LASTING = ("params", "frozen", "started", "scalars", "buffers", "half", "losses", "counts", "table")


class Marks:
    """The step counters of a job, by what has happened. One writer each; they only rise.

    A place is what a rank has at the start: its slots, its chunks, its rows. Its host may change.
    """

    def __init__(self, setting: Setting) -> None:
        places = setting.world.world_size
        self.opened = 0
        self.gradients = range(1, 1 + setting.slots)
        """By slot: its gradients of this step are complete."""
        self.norms = self._after(self.gradients, places)
        """By place: the norms of its chunks are known."""
        self.updated = self._after(self.norms, places)
        """By place: its chunks are updated."""
        self.progress = self._after(self.updated, places)
        """By place: chunks done, times two, plus one inside a chunk; of the step after `updated`. Where the first
        place updates the whole model: updates of all steps, instead of chunks."""
        self.shared_rows = self._after(self.progress, places)
        """By place: its rows of the table are filled, for the evaluation after this step."""
        self.stop_at = self._after(self.shared_rows, places)
        """By place: the step its host asks to be the last; 0 for none."""
        self.totals = self._after(self.stop_at, places)
        """By place, where there are several hosts: the sums of its chunks over all of them are here."""
        self.count = self.totals.stop

    @staticmethod
    def _after(previous: range, count: int) -> range:
        return range(previous.stop, previous.stop + count)


class SharedState:
    """Regions of the segment as tensors: parameters and optimizer state once, gradients once per slot."""

    def __init__(
        self, replica: Replica, schema: StateSchema, setting: Setting, regions: Sequence[MemoryRegion]
    ) -> None:
        """`regions`: all of the segment, as the strategy's footprint has them."""
        self.setting = setting
        places = range(setting.world.world_size)
        self.summed_slots = sorted({slot for place in places for slot in setting.slots_of(place)})
        """Those whose gradients are in this memory: all, unless other hosts have some."""
        self.schema = schema
        self.marks = Marks(setting)
        self.params = list(replica.trained.values())
        self._start = replica.start
        self._states = states_to_load(replica, schema) if schema.keeps_any else []
        self.grid = self._make_grid()
        self.units = Units([flat_of(p) for p in self.params])
        self._frozen = list(replica.untrained.values())
        self._frozen_grid = make_grid([flat_of(p) for p in self._frozen])
        self.segment = Segment(setting.world.arena_fd)
        self.memory: SharedMemory = self.segment
        """Where the model lies."""
        self.home = Home(segment=self.segment, schema=schema)
        self.lasting = [one.name for one in regions if one.name in _LASTING or one.name.startswith("state/")]
        """The regions that are the job's state between two steps."""
        for region in regions:
            self.segment.reserve(region.name, region.num_bytes)
        self.segment.add_rooms(setting.slots)

    def _make_grid(self) -> Grid:
        """Where the trained parameters lie, and what is updated at a time."""
        return arena_grid(self.params, self.setting.clip_norm)

    def finish_writes(self) -> None:
        """Wait until others can read what this process has written there."""

    def map(self) -> None:
        """Map the segment; small tables become numpy arrays, which are quicker to poke than tensors."""
        setting, segment = self.setting, self.segment
        segment.map()
        self.counters = segment.counters("counters", setting.company.on_idle)
        self.results = segment.tensor("results", torch.float64).numpy().reshape(setting.slots, -1)
        self.touched = segment.tensor("touched", torch.uint8).numpy().reshape(setting.slots, -1)
        self.norms = segment.tensor("norms", torch.float64).numpy()
        self.started = segment.tensor("started", torch.uint8)
        self.losses: np.ndarray = segment.tensor("losses", torch.float64).numpy()
        self.counts: np.ndarray = segment.tensor("counts", torch.int32).numpy().reshape(-1, setting.slots)
        """By step and slot: the samples that were used."""
        self.pace: np.ndarray = segment.tensor("pace", torch.float64).numpy()
        """By slot: seconds per sample; 0 where it was not measured yet."""
        self.sizes: np.ndarray = segment.tensor("sizes", torch.int32).numpy().reshape(-1, setting.slots)
        """By step and slot: the samples of each part, where that follows speed; all 0 for even ones."""
        self.table = segment.tensor("table", torch.float64)

    def table_of(self, serial: int, shape: tuple[int, int] | None = None) -> torch.Tensor:
        """Where a table is exchanged; all of its room where no shape is given.

        Tables of earlier calls stay, as far as there is room: a successor finds them filled.
        """
        extent = self.setting.extent
        most = (extent.table_rows, extent.table_columns)
        start = (serial - 1) % extent.tables * most[0] * most[1]
        rows, columns = shape or most
        return self.table[start : start + rows * columns].view(rows, columns)

    def bind(self) -> None:
        """Fill the shared parameters (the first worker) or wait for them; then let the replica use them."""
        world, opened = self.setting.world, self.marks.opened
        shared = [
            *self._views("params", self.grid, self.params),
            *self._views("frozen", self._frozen_grid, self._frozen),
        ]
        own = [*self.params, *self._frozen]
        if world.is_first and self.counters[opened] == 0:
            for view, param in zip(shared, own, strict=True):
                view.copy_(param.data)
            self._fill_past()
            self.finish_writes()
            self.counters.publish(opened, 1)
        self.counters.wait(opened, 1)
        for view, param in zip(shared, own, strict=True):
            param.data = view

    def _fill_past(self) -> None:
        """Leave what an earlier run came to where this one would have left it."""
        if self._states:
            first_piece = 0
            for chunk in self.grid.chunks:
                load_state(self.home, chunk, first_piece, self.params, self._states)
                first_piece += len(chunk.pieces)
        step = self._start.step
        self.losses[1 : step + 1] = self._start.losses
        if step + 1 < len(self.sizes) and len(self._start.sizes) == self.setting.slots:
            self.sizes[step + 1] = self._start.sizes
        for mark in self.marks.updated:
            self.counters[mark] = step

    def gradient_views(self, slot: int) -> list[torch.Tensor]:
        """A slot's gradients, shaped as the parameters."""
        return self._views(f"gradients/{slot}", self.grid, self.params)

    def _views(self, region: str, grid: Grid, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [
            self.memory.tensor(region, p.dtype, offset=offset, count=p.numel()).as_strided(
                p.shape, dense_stride(p)
            )
            for offset, p in zip(grid.offsets, params, strict=True)
        ]

    def whole_state(self, replica: Replica) -> dict[str, torch.Tensor]:
        """The optimizer's state by whole-parameter names, for parameters that have any."""
        first_piece: dict[int, int] = {}  # not of parameters without elements: they have no piece
        number = 0
        for chunk in self.grid.chunks:
            for piece in chunk.pieces:
                first_piece.setdefault(piece.param, number)
                number += 1
        state: dict[str, torch.Tensor] = {}
        for key in self.schema.mirrored:
            for index, (name, view) in enumerate(
                zip(replica.trained, self._views(f"state/{key}", self.grid, self.params), strict=True)
            ):
                if index in first_piece and self.started[first_piece[index]]:
                    state[f"{name}/{key}"] = view
        for column, (key, dtype) in enumerate(self.schema.scalars):
            for index, name in enumerate(replica.trained):
                if index in first_piece and self.started[first_piece[index]]:
                    state[f"{name}/{key}"] = self.home.scalar(first_piece[index], column, dtype)
        return state


def arena_grid(params: Sequence[torch.Tensor], clip_norm: float | None) -> Grid:
    """Where the trained parameters lie, and the chunks in which they are updated."""
    return make_grid([flat_of(p) for p in params], cut_bytes=cut_bytes(clip_norm))


def cut_of_grid(grid: Grid) -> CutSize:
    """Its chunks as plain sizes."""
    return CutSize(shards=(tuple(ChunkSize(chunk.nbytes, len(chunk.pieces)) for chunk in grid.chunks),))
