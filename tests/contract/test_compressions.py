"""One suite for every compression: what it may change, what it counts, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from helpers.packed import carried, gaussian
from shoal.comm import codec
from shoal.comm.codec import Message
from shoal.comm.compression import COMPRESSIONS, Packed, make_compression
from shoal.errors import SpecError, TaskError

LOSSY = ("bf16", "fp16", "int8", "int8:stochastic", "topk:0.05", "randomk:0.05", "sign", "powersgd:2")
ALL = ("none", *LOSSY, "zstd")
LOSSLESS = ("none", "zstd")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_all_of_them_are_here() -> None:
    assert {text.partition(":")[0] for text in ALL} == set(COMPRESSIONS)
    assert [make_compression(text).lossy for text in ALL] == [text in LOSSY for text in ALL]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ALL)
def test_shape_and_type_arrive_as_they_were(text, dtype):
    for shape in ((80, 60), (60,), (1,), (0,)):
        values = gaussian(*shape, dtype=dtype)
        found = carried(make_compression(text), values)
        assert (found.shape, found.dtype) == (values.shape, values.dtype)
        assert text in LOSSY or torch.equal(found, values)


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
