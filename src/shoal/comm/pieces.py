"""Packets over tcp, in pieces: a listener takes memory for a frame before it knows who sends it.

part 0    empty, which no packet begins with
part 1    how many pieces each part of the packet has, 4 bytes each, little endian
part 2…   the pieces
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

from shoal.comm.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer
from shoal.comm.reliable import Packet

PIECE_BYTES = 1 << 20
"""The most that a stranger can make a listener hold. Smaller ones would cost members speed."""
MAX_PART_BYTES = PIECE_BYTES + (64 << 10)
"""Blocks of a model that are a little larger than a piece need not be copied."""


def cut(packet: Packet) -> Packet:
    """The packet in parts of at most `MAX_PART_BYTES`, without copying anything."""
    views = [memoryview(part) for part in packet]
    if all(view.nbytes <= MAX_PART_BYTES for view in views):
        return packet
    pieces = [_cut_part(view) for view in views]
    counts = struct.pack(f"<{len(pieces)}I", *map(len, pieces))
    return [b"", counts, *(piece for each in pieces for piece in each)]


def join(packet: Packet) -> Packet:
    """The packet that `cut` was given; anything else as it is, for the one who decodes it to refuse."""
    if len(packet) < 3 or memoryview(packet[0]).nbytes:
        return packet
    counts = _read_counts(packet[1], len(packet) - 2)
    if counts is None:
        return packet
    joined: list[Buffer] = []
    at = 2
    for count in counts:
        joined.append(packet[at] if count == 1 else _glue(packet[at : at + count]))
        at += count
    return joined


def _cut_part(view: memoryview) -> list[memoryview]:
    step = PIECE_BYTES if view.nbytes > MAX_PART_BYTES else MAX_PART_BYTES
    return [view[at : at + step] for at in range(0, max(view.nbytes, 1), step)]


def _read_counts(part: Buffer, pieces: int) -> tuple[int, ...] | None:
    view = memoryview(part)
    if view.nbytes % 4 or not 0 < view.nbytes // 4 <= MAX_FRAMES + 2:
        return None
    counts = struct.unpack(f"<{view.nbytes // 4}I", view)
    is_sound = sum(counts) == pieces and 0 < min(counts) <= max(counts) <= -(-MAX_FRAME_BYTES // PIECE_BYTES)
    return cast(tuple[int, ...], counts) if is_sound else None


def _glue(pieces: Sequence[Buffer]) -> bytearray:
    return bytearray().join(pieces)
