"""The grid: every element in one chunk, aligned, whatever the model and however many processes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.arena import Flat, Grid, make_grid
from shoal.arena.grid import ALIGN, CHUNK_BYTES, CHUNKS_OF_A_SMALL_MODEL, SMALLEST_CHUNK_BYTES

DTYPES = {"bfloat16": 2, "float32": 4, "float64": 8}
flats = st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 3000) | st.sampled_from([0, 1, 16, 64])).map(
    lambda drawn: Flat(drawn[0], DTYPES[drawn[0]], drawn[1])
)
models = st.lists(flats, max_size=12)


@given(models, st.sampled_from([64, 128, 1024, 4096]))
def test_chunks_cover_every_element_once(params: list[Flat], chunk_bytes: int) -> None:
    grid = make_grid(params, chunk_bytes)
    runs = defaultdict(list)
    for chunk in grid.chunks:
        for piece in chunk.pieces:
            assert params[piece.param].dtype == chunk.dtype
            assert piece.offset == grid.offsets[piece.param] + piece.start * params[piece.param].itemsize
            assert piece.offset % ALIGN == 0
            runs[piece.param].append((piece.start, piece.stop))
    for index, flat in enumerate(params):
        elements = [element for start, stop in runs[index] for element in range(start, stop)]
        assert elements == list(range(flat.numel))


@given(models, st.sampled_from([64, 128, 1024, 4096]))
def test_nothing_overlaps_and_no_chunk_is_too_big(params: list[Flat], chunk_bytes: int) -> None:
    grid = make_grid(params, chunk_bytes)
    spans = [
        (offset, offset + flat.numel * flat.itemsize)
        for offset, flat in zip(grid.offsets, params, strict=True)
        if flat.numel
    ]
    chunks = [(chunk.offset, chunk.offset + chunk.nbytes) for chunk in grid.chunks]
    for borders in (sorted(spans), chunks):
        assert all(first[1] <= second[0] for first, second in pairwise(borders))
        assert all(0 <= start < stop <= grid.nbytes for start, stop in borders)
    assert all(chunk.nbytes <= chunk_bytes for chunk in grid.chunks)
    for chunk in grid.chunks:
        last = chunk.pieces[-1]
        end = last.offset + (last.stop - last.start) * DTYPES[chunk.dtype]
        assert (chunk.offset, chunk.offset + chunk.nbytes) == (chunk.pieces[0].offset, end)


@given(models, st.integers(1, 9))
def test_owners_share_the_chunks_out_evenly(params: list[Flat], size: int) -> None:
    grid = make_grid(params, 256)
    owned = [grid.owned_by(rank, size) for rank in range(size)]
    assert [number for numbers in owned for number in numbers] == list(range(len(grid.chunks)))
    total = sum(chunk.nbytes for chunk in grid.chunks)
    for numbers in owned:
        mine = sum(grid.chunks[number].nbytes for number in numbers)
        assert abs(mine - total / size) <= 256, "one chunk more or less than an equal share"


def _megabytes(count: int) -> Grid:
    return make_grid([Flat("float32", 4, count * (1 << 18))])


def test_chunks_grow_with_the_model_up_to_a_bound() -> None:
    assert len(make_grid([Flat("float32", 4, 100)]).chunks) == 1
    assert (
        max(chunk.nbytes for chunk in make_grid([Flat("float32", 4, 1 << 15)] * 2).chunks) == SMALLEST_CHUNK_BYTES
    )
    assert len(_megabytes(2).chunks) == CHUNKS_OF_A_SMALL_MODEL
    assert max(chunk.nbytes for chunk in _megabytes(64).chunks) == CHUNK_BYTES


def test_no_parameters_no_chunks() -> None:
    assert make_grid([]) == Grid((), 0, ())
    assert make_grid([Flat("float32", 4, 0)]).chunks == ()
    assert list(make_grid([]).owned_by(1, 2)) == []
