"""Compressions: how they are named, how far decoded values are from the encoded ones, and what they cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm import Message, codec
from shoal.comm.compression import COMPRESSIONS, Compression, Packed, make_compression
from shoal.comm.compression.int8 import BLOCK
from shoal.comm.compression.topk import largest
from shoal.errors import SpecError, TaskError

ALL = ("none", "bf16", "fp16", "int8", "topk:0.05", "powersgd:2", "zstd")
LOSSY = ("bf16", "fp16", "int8", "topk:0.05", "powersgd:2")
LOSSLESS = ("none", "zstd")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def over_the_wire(packed: Packed) -> Packed:
    """What a peer receives: through the message codec, as bytes."""
    buffers = codec.encode(Message("push", packed.fields, packed.frames))
    message = codec.decode([bytearray(buffer) for buffer in buffers])
    return Packed(message.fields, tuple(message.frames))


def carried(compression: Compression, values: torch.Tensor) -> torch.Tensor:
    out = torch.full(values.shape, 7.0, dtype=values.dtype)
    make_compression(compression.text).decode(over_the_wire(compression.encode("w", values)), out)
    return out


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ALL)
def test_the_ratio_is_that_of_the_bytes_sent(text, dtype):
    compression = make_compression(text)
    assert compression.ratio == 1.0
    sent = 0
    for key, shape in {"w": (80, 60), "b": (60,), "one": (1,), "none": (0,)}.items():
        packed = compression.encode(key, gaussian(*shape, dtype=dtype))
        sent += sum(memoryview(buffer).nbytes for buffer in codec.encode(Message("m", {}, packed.frames))[1:])
    assert compression.raw_bytes == (80 * 60 + 60 + 1) * dtype.itemsize
    assert compression.wire_bytes == sent
    assert compression.ratio == sent / compression.raw_bytes
    if text != "none" and dtype.itemsize > 2:
        assert compression.ratio < 0.98


@pytest.mark.parametrize("text, ratio", [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.251), ("topk:0.01", 0.02)])
def test_ratios_of_large_float32_tensors(text, ratio):
    compression = make_compression(text)
    compression.encode("w", gaussian(1 << 18))
    assert compression.ratio == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("text", ALL)
def test_encoding_changes_nothing_and_repeats_itself(text):
    first, second = make_compression(text), make_compression(text)
    rounds = [gaussian(50, 30, seed=seed) for seed in range(3)]
    for values in rounds:
        before = values.clone()
        one, other = first.encode("w", values), second.encode("w", values)
        assert torch.equal(values, before)
        assert [bytes(b) for b in codec.encode(Message("m", one.fields, one.frames))] == [
            bytes(b) for b in codec.encode(Message("m", other.fields, other.frames))
        ]


@pytest.mark.parametrize("text", [*LOSSY, "zstd"])
@pytest.mark.parametrize("shape", [(50, 30), (1,)])
def test_a_kept_push_survives_changes_of_its_tensor(text, shape):
    values = gaussian(*shape)
    compression = make_compression(text)
    packed, out, again = compression.encode("w", values), torch.empty(shape), torch.empty(shape)
    compression.decode(packed, out)
    values.zero_()
    compression.encode("w", values)
    compression.decode(packed, again)
    assert torch.equal(out, again)


@pytest.mark.parametrize("text", ALL)
def test_strides_of_the_source_do_not_matter(text):
    values = gaussian(30, 50).t()
    assert torch.equal(
        carried(make_compression(text), values), carried(make_compression(text), values.contiguous())
    )


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_and_leave_no_trace(text, bad):
    compression, untouched = make_compression(text), make_compression(text)
    values = gaussian(50, 30)
    poisoned = values.clone()
    poisoned[20, 10] = bad
    assert torch.equal(carried(compression, values), carried(untouched, values))
    with pytest.raises(TaskError, match="not finite"):
        compression.encode("w", poisoned)
    assert compression.ratio == untouched.ratio
    assert torch.equal(carried(compression, values), carried(untouched, values))


@pytest.mark.parametrize("values", [torch.ones(2, 2, 2), torch.tensor(1.0), torch.ones(3, dtype=torch.int32)])
def test_only_floating_vectors_and_matrices_are_taken(values):
    compression = make_compression("int8")
    with pytest.raises(SpecError, match="1 or 2 dimensions"):
        compression.encode("w", values)
    with pytest.raises(SpecError, match="1 or 2 dimensions"):
        compression.decode(Packed({}, ()), values)
    with pytest.raises(SpecError, match="contiguous"):
        compression.decode(Packed({}, ()), torch.ones(4, 6).t())
