"""Where each parameter lies in the arena, and the chunks in which it is updated. Pure arithmetic.

Chunks depend on the model alone, never on the number of processes: each is reduced and updated by whoever
owns it with exactly the same operations, which is why the bits do not depend on the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64
CHUNK_BYTES = 1 << 20
"""The unit of the redo journal, small enough for a core's own cache."""
SMALLEST_CHUNK_BYTES = 1 << 16
CHUNKS_OF_A_SMALL_MODEL = 4


@dataclass(frozen=True)
class Flat:
    """One parameter as the grid sees it."""

    dtype: str
    itemsize: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter's elements."""

    param: int
    start: int
    stop: int
    offset: int
    """Bytes from the beginning of the region."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring pieces of one dtype that are reduced, journalled and updated together."""

    dtype: str
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Grid:
    """The whole model: offsets of the parameters and chunks that cover them."""

    offsets: tuple[int, ...]
    nbytes: int
    chunks: tuple[Chunk, ...]

    def owned_by(self, rank: int, size: int) -> range:
        """The chunks that one of `size` processes updates: neighbours, an equal share of the bytes."""
        total = sum(chunk.nbytes for chunk in self.chunks)
        bounds, done, seen = [0], 0, 0
        for index, chunk in enumerate(self.chunks):
            while len(bounds) < size and (seen + chunk.nbytes / 2) * size >= total * (done + 1):
                bounds.append(index)
                done += 1
            seen += chunk.nbytes
        bounds += [len(self.chunks)] * (size + 1 - len(bounds))
        return range(bounds[rank], bounds[rank + 1])


def make_grid(params: Sequence[Flat], chunk_bytes: int | None = None, *, cut_bytes: int = ALIGN) -> Grid:
    """Lay parameters out one behind the other, by dtype, and cut them into chunks.

    A parameter is cut only at multiples of `cut_bytes` from its beginning.
    """
    order = sorted(range(len(params)), key=lambda index: _first_of_dtype(params, index))
    offsets, position = [0] * len(params), 0
    for index in order:
        offsets[index] = position
        position += _aligned(params[index].numel * params[index].itemsize)
    if chunk_bytes is None:
        small = _aligned(-(-position // CHUNKS_OF_A_SMALL_MODEL))
        chunk_bytes = min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, small))
    chunks: list[Chunk] = []
    open_pieces: list[Piece] = []
    open_bytes = 0
    for ordinal, index in enumerate(order):
        flat = params[index]
        if open_pieces and params[order[ordinal - 1]].dtype != flat.dtype:
            chunks.append(_close(params, open_pieces))
            open_pieces, open_bytes = [], 0
        start = 0
        while start < flat.numel:
            room = max(1, -(-(chunk_bytes - open_bytes) // cut_bytes)) * cut_bytes // flat.itemsize
            stop = min(flat.numel, start + room)
            open_pieces.append(Piece(index, start, stop, offsets[index] + start * flat.itemsize))
            open_bytes += _aligned((stop - start) * flat.itemsize)
            start = stop
            if open_bytes >= chunk_bytes:
                chunks.append(_close(params, open_pieces))
                open_pieces, open_bytes = [], 0
    if open_pieces:
        chunks.append(_close(params, open_pieces))
    return Grid(tuple(offsets), position, tuple(chunks))


def _first_of_dtype(params: Sequence[Flat], index: int) -> int:
    return next(i for i, flat in enumerate(params) if flat.dtype == params[index].dtype)


def _close(params: Sequence[Flat], pieces: list[Piece]) -> Chunk:
    last = pieces[-1]
    flat = params[last.param]
    end = last.offset + (last.stop - last.start) * flat.itemsize
    return Chunk(flat.dtype, pieces[0].offset, end - pieces[0].offset, tuple(pieces))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
