"""Compressions: how they are named, how far decoded values are from the encoded ones, and what they cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packed import carried, gaussian
from shoal.comm.compression import COMPRESSIONS, make_compression
from shoal.comm.compression.int8 import BLOCK
from shoal.comm.compression.sign import pack_anywhere, pack_bits, unpack_anywhere, unpack_bits
from shoal.comm.compression.topk import largest
from shoal.errors import SpecError

ALL = ("none", "bf16", "fp16", "int8", "topk:0.05", "randomk:0.05", "sign", "powersgd:2", "zstd")
LOSSY = ("bf16", "fp16", "int8", "topk:0.05", "randomk:0.05", "sign", "powersgd:2")
LOSSLESS = ("none", "zstd")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("text", ["topk", "topk:", "topk:0", "topk:-1", "topk:1.5", "topk:nan", "topk:x"])
def test_a_fraction_is_above_0_and_up_to_1(text):
    with pytest.raises(SpecError, match=r"topk:0\.01"):
        make_compression(text)


@pytest.mark.parametrize("text", ["powersgd", "powersgd:0", "powersgd:-2", "powersgd:1.5", "powersgd:²"])
def test_a_rank_is_a_whole_number(text):
    with pytest.raises(SpecError, match="powersgd:4"):
        make_compression(text)


def test_wrong_names_and_surplus_arguments_are_refused():
    with pytest.raises(SpecError, match="Did you mean 'int8'"):
        make_compression("int88")
    with pytest.raises(SpecError, match="takes no argument"):
        make_compression("int8:4")
    assert {text.partition(":")[0] for text in ALL} == set(COMPRESSIONS)


@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(LOSSLESS),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    seed=st.integers(0, 2**16),
)
def test_lossless_ones_keep_every_bit(text, dtype, shape, seed):
    noise = torch.randint(256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    values = noise.to(torch.uint8).view(dtype).reshape(shape)  # NaNs, infinities and negative zeros among them
    assert bits(carried(make_compression(text), values)) == bits(values)


def test_zstd_shuffles_where_it_helps_and_only_there():
    compression = make_compression("zstd")
    gradients = gaussian(500_000) * 1e-3
    sparse = gradients * (gaussian(500_000, seed=1) > 1)
    packed = compression.encode("w", gradients)
    assert packed.fields == {"shuffled": True} and packed.num_bytes < 0.9 * gradients.nbytes
    packed = compression.encode("w", sparse)
    assert packed.fields == {"shuffled": False} and packed.num_bytes < 0.4 * sparse.nbytes
    for values in (gradients, sparse):
        assert bits(carried(compression, values)) == bits(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text, bits_kept", [("bf16", 8), ("fp16", 11)])
def test_casts_are_within_half_a_unit_of_the_last_place(text, bits_kept, dtype):
    values = gaussian(40, 50, dtype=dtype)
    error = (carried(make_compression(text), values).double() - values.double()).abs()
    assert (error <= values.double().abs() * 2.0**-bits_kept + 2.0**-25).all()
    assert bool(error.max() > 0) == (dtype.itemsize > 2)  # 16-bit tensors travel as they are


def test_values_beyond_fp16_saturate_and_come_later():
    compression = make_compression("fp16")
    values = torch.tensor([1e5, -1e5, 1.0, 0.0])
    first, second = carried(compression, values), carried(compression, torch.zeros(4))
    assert first.tolist() == [65504, -65504, 1, 0]
    assert (first + second).tolist() == pytest.approx([1e5, -1e5, 1, 0], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 17])
def test_int8_is_within_half_a_step_of_its_block(size, dtype):
    values = gaussian(size, dtype=dtype)
    values[0] = 1000.0  # An outlier coarsens its own block only.
    decoded = carried(make_compression("int8"), values)
    for block, got in zip(values.split(BLOCK), decoded.split(BLOCK), strict=True):
        step = block.abs().max() / 127
        assert (got - block).abs().max() <= step * 0.5001
        assert got.unique().numel() > 1 or block.numel() == 1


def test_int8_of_the_smallest_numbers_does_not_wrap():
    smallest = 2.0**-149
    below_a_scale, between_two_scales = torch.full((BLOCK,), -60 * smallest), torch.full((BLOCK,), 317 * smallest)
    steps, scales = make_compression("int8").encode("w", torch.cat([below_a_scale, between_two_scales])).frames
    assert scales.tolist() == [0.0, 2 * smallest]  # 317 / 127 is 2.5, and 158 steps of 2 do not fit a byte.
    assert (steps[:BLOCK] == 0).all() and (steps[BLOCK:] == 127).all()


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-20, 1e20, 1.7e38])
def test_extreme_values_stay_finite(text, scale):
    compression = make_compression(text)
    values = gaussian(64, 33).sign() * scale
    for push in (values, torch.zeros(64, 33), torch.zeros(64, 33)):
        assert torch.isfinite(carried(compression, push)).all()


@pytest.mark.parametrize("text", ["bf16", "fp16", "int8", "topk:0.05"])
def test_rounding_the_largest_float32_does_not_make_it_infinite(text):
    compression, largest_float = make_compression(text), torch.finfo(torch.float32).max
    for push in (torch.full((64, 33), largest_float), torch.zeros(64, 33)):
        assert torch.isfinite(carried(compression, push)).all()


@pytest.mark.parametrize("text", ["int8", "topk:0.05", "powersgd:2"])
def test_float16_tensors_near_their_limit_stay_finite(text):
    compression = make_compression(text)
    values = torch.full((64, 33), 65504.0, dtype=torch.float16)
    for _ in range(3):
        assert torch.isfinite(carried(compression, values)).all()


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 300), fraction=st.floats(0.001, 1.0), seed=st.integers(0, 99), levels=st.integers(1, 9))
def test_topk_sends_the_largest(size, fraction, seed, levels):
    values = (gaussian(size, seed=seed) * levels).round() / levels  # Many of equal size.
    decoded = carried(make_compression(f"topk:{fraction}"), values)
    kept = decoded != 0
    assert torch.equal(decoded[kept], values[kept])
    if not kept.all():
        assert int(kept.sum()) <= max(1, round(fraction * size)) or torch.equal(decoded, values)
        assert values[~kept].abs().max() <= decoded.abs().where(kept, torch.inf).min()


@pytest.mark.parametrize("count", [1, 1000, 150_000])
@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_selection_by_sample_is_exact(count, factor):
    values = gaussian(300_000).abs()
    values[::4] *= factor  # What the sample sees: typical values, only small ones, only large ones.
    indices = largest(values, count)
    assert torch.equal(values[indices].sort().values, values.topk(count).values.flip(0))
    assert torch.equal(indices, indices.unique())


def test_powersgd_finds_a_matrix_of_its_rank():
    left, right = gaussian(60, 2), gaussian(40, 2, seed=1)
    matrix = left @ right.t()
    assert torch.allclose(carried(make_compression("powersgd:2"), matrix), matrix, atol=1e-4)


def test_powersgd_carries_float16_sums_beyond_float16():
    matrix = torch.full((64, 33), 30000.0, dtype=torch.float16)  # A column adds up to a factor of 240000.
    assert torch.allclose(carried(make_compression("powersgd:2"), matrix), matrix, rtol=0.02)


def test_powersgd_comes_close_to_the_best_approximation():
    matrix = gaussian(60, 40) @ torch.diag(0.8 ** torch.arange(40.0)) @ gaussian(40, 40, seed=1)
    best = torch.linalg.svdvals(matrix)[4:].norm()
    compression = make_compression("powersgd:4", error_feedback=False)
    errors = [float((carried(compression, matrix) - matrix).norm()) for _ in range(10)]
    assert errors[-1] < 1.05 * best  # The warm start turns ten calls into ten power iterations.
    assert errors[0] > errors[-1]


@pytest.mark.parametrize("shape", [(100,), (1, 100), (4, 4), (0,), (0, 5)])
def test_powersgd_sends_raw_what_is_no_large_matrix(shape):
    values = gaussian(*shape)
    compression = make_compression("powersgd:2")
    assert torch.equal(carried(compression, values), values)
    assert compression.wire_bytes == values.nbytes


@pytest.mark.parametrize("text, ratio", [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.251), ("topk:0.01", 0.02)])
def test_ratios_of_large_float32_tensors(text, ratio):
    compression = make_compression(text)
    compression.encode("w", gaussian(1 << 18))
    assert compression.ratio == pytest.approx(ratio, rel=0.01)


@given(seed=st.integers(0, 1000), count=st.integers(1, 100))
def test_bits_are_packed_alike_on_devices(seed, count):
    given_bits = torch.rand(count, generator=torch.Generator().manual_seed(seed)) > 0.5
    packed = pack_anywhere(given_bits)
    assert packed.tolist() == pack_bits(given_bits).tolist()
    assert unpack_anywhere(packed, count).tolist() == unpack_bits(packed, count).tolist() == given_bits.tolist()
