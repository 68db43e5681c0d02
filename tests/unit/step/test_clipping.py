"""Norms by units: the same bits however a model is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.arena import Flat, make_grid
from shoal.layout import Parcel, place_shards
from shoal.step.clipping import UNIT_BYTES, ChunkNorms, Units, clip_factor, cut_bytes
from shoal.strategies.ps.blocks import make_blocks

NUMELS = (5, 4096, 20_000, 0, 8192, 300_000, 1)
FLATS = [Flat("torch.float32", 4, numel) for numel in NUMELS]


def squares(chunks: list, memory: torch.Tensor, touched: list[bool] | None = None) -> np.ndarray:
    """By unit: its squared norm, measured chunk by chunk."""
    units = Units(FLATS)
    found = np.full(len(units), np.nan)
    for chunk in chunks:
        norms = ChunkNorms(units, chunk)
        gradient = memory[chunk.offset : chunk.offset + chunk.nbytes].view(torch.float32)
        assert np.isnan(found[norms.numbers]).all(), "a unit lies in two chunks"
        found[norms.numbers] = norms.measure(gradient, touched)
    assert not np.isnan(found).any()
    return found


def test_norms_are_the_same_however_the_model_is_cut() -> None:
    memory = torch.randn(make_grid(FLATS).nbytes // 4).view(torch.uint8)
    cuts = [make_grid(FLATS, size, cut_bytes=UNIT_BYTES).chunks for size in (1 << 14, 1 << 16, 1 << 20)]
    parcels = [Parcel(name="p", kind="Linear", numel=numel, itemsize=4) for numel in NUMELS]
    for servers in (1, 3):
        placement = place_shards(parcels, servers=servers, cut_bytes=UNIT_BYTES)
        blocks = make_blocks(placement.shards, FLATS, make_grid(FLATS), cut_bytes=UNIT_BYTES)
        cuts.append([block.chunk for shard in blocks for block in shard])
    assert len({len(cut) for cut in cuts}) == len(cuts)
    first, *others = [squares(list(cut), memory) for cut in cuts]
    assert all(np.array_equal(first, other) for other in others)


def test_the_factor_is_that_of_torch() -> None:
    grid = make_grid(FLATS, cut_bytes=UNIT_BYTES)
    memory = torch.randn(grid.nbytes // 4)
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    for param, offset in zip(params, grid.offsets, strict=True):
        param.grad = memory[offset // 4 : offset // 4 + param.numel()].clone()
    norm = float(torch.nn.utils.clip_grad_norm_(params, 3.0))
    found = clip_factor(squares(list(grid.chunks), memory.view(torch.uint8)), 3.0)
    assert found == pytest.approx(3.0 / norm, rel=1e-5)
    assert clip_factor(np.array([0.25, 0.0]), 3.0) == 1.0


def test_what_got_no_gradient_counts_nothing() -> None:
    grid = make_grid(FLATS, cut_bytes=UNIT_BYTES)
    memory = torch.full((grid.nbytes // 4,), torch.nan)
    touched = [numel == 1 for numel in NUMELS]
    memory[grid.offsets[-1] // 4] = 2.0
    found = squares(list(grid.chunks), memory.view(torch.uint8), touched)
    assert found.tolist() == [0.0] * (len(found) - 1) + [4.0]


def test_only_clipping_asks_for_such_cuts() -> None:
    assert (cut_bytes(None), cut_bytes(1.0)) == (64, UNIT_BYTES)
