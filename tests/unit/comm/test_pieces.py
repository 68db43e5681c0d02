"""Packets in pieces: they come out as they went in, and what was never cut is left alone."""

from __future__ import annotations

import random
import struct

import pytest

from shoal.comm.codec import MAX_FRAME_BYTES, MAX_FRAMES
from shoal.comm.pieces import MAX_PART_BYTES, PIECE_BYTES, cut, join

SIZES = (0, 1, PIECE_BYTES, MAX_PART_BYTES, MAX_PART_BYTES + 1, 2 * PIECE_BYTES, 5 * PIECE_BYTES + 7)


def packet(*sizes: int) -> list[bytes]:
    return [b"header", *(random.Random(size).randbytes(size) for size in sizes)]


def as_bytes(parts: list) -> list[bytes]:
    return [bytes(part) for part in parts]


@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), SIZES, ()])
def test_what_is_cut_is_joined(sizes: tuple[int, ...]) -> None:
    whole = packet(*sizes)
    pieces = cut(whole)
    assert max(memoryview(piece).nbytes for piece in pieces) <= MAX_PART_BYTES
    assert as_bytes(join(pieces)) == whole
    if max(sizes, default=0) <= MAX_PART_BYTES:
        assert pieces is whole, "it is sent as it is"


def test_the_largest_packet_fits() -> None:
    whole = [b"header", bytes(MAX_FRAME_BYTES)]
    assert as_bytes(join(cut(whole))) == whole


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"", b""],
        [b"", b"\1\0\0\0"],
        [b"", b"\2\0\0\0", b"one"],
        [b"", b"\0\0\0\0", b"one"],
        [b"", b"\xff\xff\xff\xff", b"one"],
        [b"", b"\1\0\0", b"one"],
        [b"", struct.pack("<3I", 1, 1, 2**32 - 1), b"one"],
        [b"", b"\1\0\0\0" * (MAX_FRAMES + 3), *[b"x"] * (MAX_FRAMES + 3)],
        [b"", struct.pack("<I", 66), *[b"x"] * 66],
        [b"plain", b"\1\0\0\0", b"one"],
    ],
)
def test_what_was_never_cut_is_left_for_others_to_refuse(parts: list[bytes]) -> None:
    assert join(parts) is parts
