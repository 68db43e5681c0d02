"""Where a served model lies: two copies of every shard, and what the workers push.

On one host all of it is one segment that servers and workers map; over tcp every process has its own, and uses
the regions that are its business. Pages that nobody touches cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.arena import Segment, make_grid
from shoal.arena.waits import LINE
from shoal.layout import Placement
from shoal.ps.buffers import Label
from shoal.strategies.chunk import SCALAR_BYTES, Home
from shoal.strategies.clipping import Units, cut_bytes
from shoal.strategies.data.shared import dense_stride, flat_of
from shoal.strategies.optimizers import StateSchema
from shoal.strategies.ps.blocks import ShardBlock, make_blocks
from shoal.strategies.replica import Replica

_LABEL_BYTES = 6 * 8
JOURNAL_BYTES = 1 << 19
JOURNAL_SHARE = 64
"""A slot of a journal has so many bytes, and this share of the model's: norms of its gradient are noted, too."""
NUM_PARTS = 4
"""Of a whole copy: what its own workers pushed, and the sum of all, of this round and of the last."""
_PAGE = 4096


def marked(copy: int) -> str:
    """The name of the copy that remembers what another was when it was last marked."""
    return f"marked/{copy}"


class ServedMemory:
    """Regions by name; `fd` is the host's segment, None for one of this process's own."""

    def __init__(
        self,
        replica: Replica,
        schema: StateSchema,
        placement: Placement,
        *,
        fd: int | None,
        num_buffers: int,
        moving_bytes: int,
        copies: int = 2,
        has_parts: bool = False,
    ) -> None:
        self.schema = schema
        self.copies = copies
        """Places for every shard; where a shard is a whole copy of the model, one for each of them."""
        self.params = list(replica.trained.values())
        flats = [flat_of(p) for p in self.params]
        self.grid = make_grid(flats)
        self.units = Units(flats)
        cut = cut_bytes(replica.task.clip_norm)
        self.blocks = make_blocks(placement.shards, flats, self.grid, cut_bytes=cut)
        """By shard: its chunks, in parameter order."""
        self.segment = Segment(fd)
        self.num_buffers = num_buffers
        self.num_blocks = sum(map(len, self.blocks))
        num_pieces = sum(len(block.chunk.pieces) for blocks in self.blocks for block in blocks)
        for copy in range(copies):
            for name, nbytes in Home.regions(schema, self.grid.nbytes, num_pieces, f"/{copy}"):
                self.segment.reserve(name, nbytes)
            self.segment.reserve(f"versions/{copy}", 4 * self.num_blocks)
            self.segment.reserve(f"updates/{copy}", 8 * len(self.blocks))
            self.segment.reserve(f"moving/{copy}", moving_bytes)
            self._reserve_legacy(copy, num_pieces, moving_bytes)
            for number in range(NUM_PARTS if has_parts else 0):
                self.segment.reserve(f"part/{copy}/{number}", self.grid.nbytes)
        for number in range(num_buffers):
            self.segment.reserve(f"gradients/{number}", self.grid.nbytes)
            self.segment.reserve(f"touched/{number}", len(self.params))
            self.segment.reserve(f"label/{number}", _LABEL_BYTES)
            self.segment.reserve(f"moved/{number}", moving_bytes)
        self.segment.map()

    def _reserve_legacy(self, copy: int, num_pieces: int, moving_bytes: int) -> None:
        """What a killed server's successor needs besides the values: a journal by shard, and the last mark."""
        for name, nbytes in Home.regions(self.schema, self.grid.nbytes, num_pieces, f"/{marked(copy)}"):
            self.segment.reserve(name, nbytes)
        self.segment.reserve(f"moving/{marked(copy)}", moving_bytes)
        for shard, blocks in enumerate(self.blocks):
            self.segment.reserve(f"journal/{copy}/{shard}", _PAGE)
            for slot in range(2):
                nbytes = JOURNAL_BYTES + self.grid.nbytes // JOURNAL_SHARE
                self.segment.reserve(f"journal/{copy}/{shard}/{slot}", nbytes)
            largest = max((self._undo_bytes(block) for block in blocks), default=0)
            self.segment.reserve(f"undo/{copy}/{shard}", largest)

    def _undo_bytes(self, block: ShardBlock) -> int:
        """Room for all that an update of a block changes, each tensor padded to a cache line."""
        mirrored, pieces = 1 + len(self.schema.mirrored), len(block.chunk.pieces)
        small = pieces * (1 + SCALAR_BYTES * len(self.schema.scalars))
        return mirrored * (block.chunk.nbytes + LINE) + small + 2 * LINE

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
            scalars = home.scalar_bytes(block.first_piece, len(block.chunk.pieces))
            tensors += [
                home.flat("params", block.chunk, dtype),
                *(home.flat(f"state/{key}", block.chunk, dtype) for key in self.schema.mirrored),
                home.started(block.first_piece, len(block.chunk.pieces)),
                *([scalars] if scalars.numel() else []),
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

    def label(self, number: int) -> Label:
        """What a buffer holds; of clock 0 where it was never filled."""
        clock, cell, weight, loss, scaled, scale = self._label_words(number).tolist()
        return Label(int(clock), int(cell), weight, loss, bool(scaled), scale)

    def put_label(self, number: int, label: Label) -> None:
        """Say what a buffer holds. Its clock, one word, is written last, and 0 first: a death tears no label."""
        words = self._label_words(number)
        words[0] = 0.0
        words[1:] = (label.cell, label.weight, label.loss, label.scaled, label.scale)
        words[0] = label.clock

    def _label_words(self, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self.segment.tensor(f"label/{number}", torch.float64).numpy()

    def touched(self, number: int) -> torch.Tensor:
        """By parameter: whether this buffer has a gradient for it."""
        return self.segment.tensor(f"touched/{number}", torch.uint8)

    def moved(self, number: int) -> torch.Tensor:
        """The moving buffers (BatchNorm's statistics) that came with this gradient."""
        return self.segment.tensor(f"moved/{number}", torch.uint8)

    def moving(self, copy: int | str) -> torch.Tensor:
        """The moving buffers as they are committed."""
        return self.segment.tensor(f"moving/{copy}", torch.uint8)

    def views(self, region: str) -> list[torch.Tensor]:
        """A region shaped as the parameters."""
        return shaped(self.segment.tensor(region, torch.uint8), self.grid.offsets, self.params)


def shaped(memory: torch.Tensor, offsets: Sequence[int], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes as tensors of the parameters' types, shapes and strides."""
    views = []
    for offset, p in zip(offsets, params, strict=True):
        flat = memory[offset : offset + p.numel() * p.element_size()].view(p.dtype)
        views.append(flat.as_strided(p.shape, dense_stride(p), flat.storage_offset()))
    return views
