"""Packed tensors that do not fit: refused before memory is taken, and the target stays as it was."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.compression import Packed, make_compression
from shoal.comm.compression.int8 import BLOCK
from shoal.errors import ProtocolError

SHAPE = (40, 60)
NUMEL = 40 * 60
ALL = ("none", "bf16", "fp16", "int8", "topk:0.05", "randomk:0.05", "sign", "powersgd:2", "zstd")


def packed_by(text: str, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> Packed:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return make_compression(text).encode("w", values)


def refused(text: str, packed: Packed, shape: tuple[int, ...] = SHAPE) -> None:
    """The tensor is refused, and its target keeps every element."""
    out = torch.full(shape, 7.0)
    with pytest.raises(ProtocolError):
        make_compression(text).decode(packed, out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("text", ALL)
def test_the_sound_one_is_accepted(text):
    out = torch.full(SHAPE, 7.0)
    make_compression(text).decode(packed_by(text), out)
    assert not (out == 7.0).any()


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("shape", [(40, 61), (39, 60), (80, 60), (4, 6), (1, 1), (0, 60)])
def test_tensors_of_another_size_are_refused(text, shape):
    refused(text, packed_by(text, shape))


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "powersgd:2"])
@pytest.mark.parametrize("shape", [(60, 40), (NUMEL,)])
def test_tensors_of_another_shape_are_refused_where_shapes_travel(text, shape):
    refused(text, packed_by(text, shape))


@pytest.mark.parametrize("text", ["none", "topk:0.05", "powersgd:2", "zstd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_tensors_of_another_type_are_refused(text, dtype):
    refused(text, packed_by(text, dtype=dtype))


@pytest.mark.parametrize("text, other", list(permutations(ALL, 2)))
def test_what_another_compression_made_is_refused(text, other):
    refused(text, packed_by(other))


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize(
    "change",
    [
        lambda frames: (),
        lambda frames: frames[:-1],
        lambda frames: (*frames, frames[0]),
        lambda frames: frames * 2,
        lambda frames: (b"", *frames[1:]),
        lambda frames: (torch.empty(0), *frames[1:]),
        lambda frames: (*frames[:-1], bytes(1000)),
    ],
)
def test_missing_surplus_and_foreign_frames_are_refused(text, change: Callable):
    packed = packed_by(text)
    refused(text, Packed(packed.fields, change(packed.frames)))


@pytest.mark.parametrize("text", ALL)
def test_foreign_fields_are_refused(text):
    packed = packed_by(text)
    refused(text, Packed({**packed.fields, "count": 2**62}, packed.frames))


@pytest.mark.parametrize("text", ["int8", "topk:0.05", "powersgd:2", "bf16"])
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_frames_cut_or_stretched_are_refused(text, data):
    packed = packed_by(text)
    which = data.draw(st.integers(0, len(packed.frames) - 1))
    frame = packed.frames[which]
    rows = data.draw(st.integers(0, 2 * len(frame)).filter(lambda rows: rows != len(frame)))
    changed = torch.cat([frame, frame])[:rows]
    refused(text, Packed({}, (*packed.frames[:which], changed, *packed.frames[which + 1 :])))


@pytest.mark.parametrize("text", ["int8", "topk:0.05"])
def test_swapped_frames_are_refused(text):
    packed = packed_by(text)
    refused(text, Packed({}, packed.frames[::-1]))


@pytest.mark.parametrize("place, index", [(0, -1), (0, -(2**31)), (-1, NUMEL), (-1, 2**31 - 1), (5, None)])
def test_indices_out_of_range_or_twice_are_refused(place, index):
    indices, values = packed_by("topk:0.05").frames
    indices = indices.clone()
    indices[place] = indices[place - 1] if index is None else index
    refused("topk:0.05", Packed({}, (indices, values)))


def test_indices_that_do_not_ascend_are_refused():
    indices, values = packed_by("topk:0.05").frames
    refused("topk:0.05", Packed({}, (indices.flip(0), values)))
    refused("topk:0.05", Packed({}, (indices.long(), values)))
    refused("topk:0.05", Packed({}, (indices.view(-1, 2), values)))


def test_int8_scales_must_match_the_blocks():
    steps, scales = packed_by("int8", (3 * BLOCK,)).frames
    for wrong in (scales[:2], torch.ones(4), scales.double(), scales.view(1, 3)):
        refused("int8", Packed({}, (steps, wrong)), shape=(3 * BLOCK,))


@pytest.mark.parametrize("flag", [None, 1, "yes", [True]])
def test_the_shuffle_flag_is_true_or_false(flag):
    refused("zstd", Packed({"shuffled": flag}, packed_by("zstd").frames))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damaged_zstd_frames_are_refused_or_fill_the_target(data):
    (frame,) = packed_by("zstd").frames
    damaged = bytearray(frame)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    out = torch.full(SHAPE, 7.0)
    try:
        make_compression("zstd").decode(Packed({"shuffled": True}, (bytes(damaged),)), out)
    except ProtocolError:
        assert (out == 7.0).all()
    else:  # A flip inside stored bytes is for the message's checksum to find.
        assert (out != 7.0).all()


def bombs() -> dict[str, bytes]:
    """Few bytes that unpack to many, or say they do."""
    zeros = bytes(64 << 20)
    honest = zstandard.ZstdCompressor(level=3).compress(zeros)
    silent = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(zeros)
    # A frame of one segment says its size in the 8 bytes after the magic number and the descriptor.
    huge = b"\x28\xb5\x2f\xfd" + b"\xe0" + (2**62).to_bytes(8, "little") + honest[-20:]
    right_size = zstandard.ZstdCompressor(level=3).compress(bytes(NUMEL * 4))
    # The honest one has its size in 4 bytes, after one more for the window.
    liar = honest[:6] + (NUMEL * 4).to_bytes(4, "little") + honest[10:]
    assert zstandard.get_frame_parameters(liar).content_size == NUMEL * 4
    skippable = b"\x50\x2a\x4d\x18" + (NUMEL * 4).to_bytes(4, "little") + bytes(NUMEL * 4)
    return {
        "honest": honest,
        "silent": silent,
        "huge": huge,
        "two frames": right_size + honest,
        "trailing bytes": right_size + b"tail",
        "liar": liar,
        "skippable": skippable,
        "empty": b"",
    }


def test_bombs_are_refused_and_take_no_memory():
    frames = bombs()
    # Python's allocator gives zstandard its output, so this sees it.
    tracemalloc.start()
    try:
        for frame in frames.values():
            refused("zstd", Packed({"shuffled": False}, (frame,)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("text", ["none", "bf16", "int8", "topk:0.05", "powersgd:2"])
def test_frames_that_announce_more_than_they_hold_are_refused(text):
    """A broadcast tensor claims any size without holding it: nothing may be made of that size."""
    packed = packed_by(text)
    giants = tuple(frame[:1].expand(1 << 40, *frame.shape[1:]) for frame in packed.frames)
    refused(text, Packed({}, giants))
