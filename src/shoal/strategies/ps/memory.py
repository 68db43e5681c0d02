"""Where a served model lies: two copies of every shard, and what the workers push.

On one host all of it is one segment that servers and workers map; over tcp every process has its own, and uses
the regions that are its business. Only what a worker pushes lies in its host's memory there, too, where whoever
follows it finds it. Pages that nobody touches cost nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from shoal.arena import Grid, Segment
from shoal.arena.tensors import dense_stride, flat_of
from shoal.model.optimizer.chunk import Home
from shoal.model.optimizer.kinds import StateSchema
from shoal.model.replica import Replica
from shoal.ps.buffers import LabelWords
from shoal.spec.footprint import MemoryRegion
from shoal.step.clipping import Units
from shoal.strategies.ps.blocks import ShardBlock

_PUSHED = ("gradients/", "touched/", "label/", "moved/")
"""Regions of a push."""


def word_of(attempt: str) -> int:
    """What stands in memory that outlives an attempt for the one that wrote there."""
    return zlib.crc32(attempt.encode())


class ServedMemory:
    """Regions by name; `fd` is the host's segment, None for one of this process's own."""

    def __init__(
        self,
        replica: Replica,
        schema: StateSchema,
        grid: Grid,
        blocks: list[list[ShardBlock]],
        regions: Sequence[MemoryRegion],
        *,
        fd: int | None,
        copies: int,
        rooms: int,
        attempt: str = "",
        pushed: Segment | None = None,
    ) -> None:
        """`regions`: all of the segment, as the strategy's footprint has them; `rooms`: of slots that meet;
        `pushed`: where pushes lie, if not with all else."""
        self.schema = schema
        self.copies = copies
        """Homes for every shard; where a shard is a whole copy of the model, one for each of them."""
        self.params = list(replica.trained.values())
        self.grid = grid
        self.units = Units([flat_of(p) for p in self.params])
        self.blocks = blocks
        """By shard: its chunks, in parameter order."""
        self.segment = Segment(fd)
        self.pushed = self.segment if pushed is None else pushed
        self.num_buffers = sum(region.name.startswith("gradients/") for region in regions)
        for region in regions:
            self._segment_of(region.name).reserve(region.name, region.num_bytes)
        self.segment.add_rooms(rooms)
        self.segment.map()
        if pushed is not None:
            pushed.map()
        self.labels = LabelWords(
            [self.tensor(f"label/{number}", torch.float64).numpy() for number in range(self.num_buffers)],
            attempt=word_of(attempt),
        )
        """What each buffer holds."""

    def tensor(
        self, region: str, dtype: torch.dtype, *, offset: int = 0, count: int | None = None
    ) -> torch.Tensor:
        """A flat tensor over (part of) a region, wherever that lies."""
        return self._segment_of(region).tensor(region, dtype, offset=offset, count=count)

    def journal(self, shard: int, copy: int) -> tuple[memoryview, memoryview, memoryview]:
        """A few words, and two slots for records."""
        name = f"journal/{copy}/{shard}"
        words, *slots = (
            self.segment.tensor(f"{name}{part}", torch.uint8).numpy().data for part in ("", "/0", "/1")
        )
        return words.cast("Q"), slots[0], slots[1]

    def undo(self, shard: int, copy: int) -> torch.Tensor:
        """Room for one block as it was before it changed."""
        return self.segment.tensor(f"undo/{copy}/{shard}", torch.uint8)

    def home(self, copy: int | str) -> Home:
        """Values and optimizer state of one copy."""
        return Home(segment=self.segment, schema=self.schema, suffix=f"/{copy}")

    def live(self, shard: int, copy: int | str) -> list[torch.Tensor]:
        """All of one copy of a shard that updates change: values, optimizer state, flags, scalars."""
        home, tensors = self.home(copy), []
        for block in self.blocks[shard]:
            dtype = self.params[block.chunk.pieces[0].param].dtype
            scalars = home.scalar_blocks(block.first_piece, len(block.chunk.pieces))
            tensors += [
                home.flat("params", block.chunk, dtype),
                *(home.flat(f"state/{key}", block.chunk, dtype) for key in self.schema.mirrored),
                home.started(block.first_piece, len(block.chunk.pieces)),
                *scalars,
            ]
        return tensors

    def versions(self, copy: int) -> memoryview:
        """By block: a number that is odd while the block changes, and another one afterwards."""
        words = self.segment.tensor(f"versions/{copy}", torch.int32).numpy()
        return memoryview(words)  # type: ignore[arg-type]

    def updates(self, copy: int) -> memoryview:
        """By shard: how many updates it has seen."""
        words = self.segment.tensor(f"updates/{copy}", torch.int64).numpy()
        return memoryview(words)  # type: ignore[arg-type]

    def touched(self, number: int) -> torch.Tensor:
        """By parameter: whether this buffer has a gradient for it."""
        return self.tensor(f"touched/{number}", torch.uint8)

    def moved(self, number: int) -> torch.Tensor:
        """The moving buffers (BatchNorm's statistics) that came with this gradient."""
        return self.tensor(f"moved/{number}", torch.uint8)

    def moving(self, copy: int | str) -> torch.Tensor:
        """The moving buffers as they are committed."""
        return self.segment.tensor(f"moving/{copy}", torch.uint8)

    def views(self, region: str) -> list[torch.Tensor]:
        """A region shaped as the parameters."""
        return shaped(self.tensor(region, torch.uint8), self.grid.offsets, self.params)

    def _segment_of(self, region: str) -> Segment:
        return self.pushed if region.startswith(_PUSHED) else self.segment


def shaped(memory: torch.Tensor, offsets: Sequence[int], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes as tensors of the parameters' types, shapes and strides."""
    views = []
    for offset, p in zip(offsets, params, strict=True):
        flat = memory[offset : offset + p.numel() * p.element_size()].view(p.dtype)
        views.append(flat.as_strided(p.shape, dense_stride(p), flat.storage_offset()))
    return views
