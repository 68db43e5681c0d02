"""From a placement to the blocks in which servers update and workers fetch: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.arena import Chunk, Flat, Grid, Piece, make_grid
from shoal.arena.grid import ALIGN, CHUNK_BYTES
from shoal.arena.tensors import flat_of
from shoal.layout import Parcel, Placement, Span
from shoal.spec.model_size import ChunkSize, CutSize


@dataclass(frozen=True)
class ShardBlock:
    """A chunk of the model with its number among all chunks and pieces of all shards."""

    number: int
    first_piece: int
    chunk: Chunk


def lay_out(
    placement: Placement, params: Sequence[torch.Tensor], cut_bytes: int
) -> tuple[Grid, list[list[ShardBlock]]]:
    """Where the parameters lie in a copy of the model, and by shard its blocks."""
    flats = [flat_of(p) for p in params]
    grid = make_grid(flats)
    return grid, make_blocks(placement.shards, flats, grid, cut_bytes=cut_bytes)


def cut_of_blocks(blocks: Iterable[Iterable[ShardBlock]]) -> CutSize:
    """Blocks as plain sizes."""
    return CutSize(
        shards=tuple(
            tuple(ChunkSize(block.chunk.nbytes, len(block.chunk.pieces)) for block in shard) for shard in blocks
        )
    )


def make_blocks(
    shards: Sequence[Sequence[Span]], flats: Sequence[Flat], grid: Grid, *, cut_bytes: int = ALIGN
) -> list[list[ShardBlock]]:
    """Each shard's spans as chunks of neighbouring memory, each cut as soon after `CHUNK_BYTES` as it may be."""
    result: list[list[ShardBlock]] = []
    number = first_piece = 0
    for spans in shards:
        blocks = []
        for pieces in _runs(spans, flats, grid, cut_bytes):
            flat = flats[pieces[0].param]
            last = pieces[-1]
            nbytes = last.offset + (last.stop - last.start) * flat.itemsize - pieces[0].offset
            blocks.append(
                ShardBlock(number, first_piece, Chunk(flat.dtype, pieces[0].offset, nbytes, tuple(pieces)))
            )
            number, first_piece = number + 1, first_piece + len(pieces)
        result.append(blocks)
    return result


def _runs(spans: Sequence[Span], flats: Sequence[Flat], grid: Grid, cut_bytes: int) -> list[list[Piece]]:
    runs: list[list[Piece]] = []
    end = size = -1
    for span in spans:
        flat = flats[span.param]
        start = span.start
        while start < span.stop:
            offset = grid.offsets[span.param] + start * flat.itemsize
            joins = offset == end and size < CHUNK_BYTES and flats[runs[-1][-1].param].dtype == flat.dtype
            room = CHUNK_BYTES - size if joins else CHUNK_BYTES
            stop = min(span.stop, start + -(-room // cut_bytes) * cut_bytes // flat.itemsize)
            if not joins:
                runs.append([])
                size = 0
            runs[-1].append(Piece(span.param, start, stop, offset))
            nbytes = -(-(stop - start) * flat.itemsize // ALIGN) * ALIGN
            end, size, start = offset + nbytes, size + nbytes, stop
    return runs


def parcels_of(module: nn.Module, trained: Iterable[str]) -> list[Parcel]:
    """The trained parameters as placement sees them, in order."""
    return [
        Parcel(
            name=name,
            kind=type(module.get_submodule(name.rpartition(".")[0])).__name__,
            numel=module.get_parameter(name).numel(),
            itemsize=module.get_parameter(name).element_size(),
        )
        for name in trained
    ]
