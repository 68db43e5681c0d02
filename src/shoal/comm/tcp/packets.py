"""Packets as bytes of a stream: how many parts, the length of each, the parts."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from shoal.comm.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer
from shoal.comm.reliable import Packet
from shoal.comm.tcp.handshake import Steps, read_exactly, read_into, write_all
from shoal.comm.tcp.records import ByteStream
from shoal.errors import ProtocolError

_COUNT = struct.Struct("<I")
_MOST_PARTS = MAX_FRAMES + 2
_SMALL_BYTES = 16 << 10
"""Parts up to here are copied together: each write costs more than that."""


def write_packet(sock: ByteStream, packet: Packet) -> Steps[int]:
    """Write a packet from where it lies; how many bytes that took."""
    written = 0
    for run in runs_of(packet):
        yield from write_all(sock, run)
        written += len(run)
    return written


def runs_of(packet: Packet) -> Iterator[bytearray | memoryview]:
    """A packet as bytes, in as few pieces as can be had without copying much."""
    views = [_bytes_of(part) for part in packet]
    together = bytearray(_COUNT.pack(len(views)) + struct.pack(f"<{len(views)}Q", *map(len, views)))
    for view in views:
        if len(view) <= _SMALL_BYTES:
            together += view
            continue
        if together:
            yield together
        yield view
        together = bytearray()
    if together:
        yield together


def _bytes_of(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


def read_packet(sock: ByteStream) -> Steps[Packet]:
    """The next packet. Memory is taken for a part when its time comes, and not for what is only announced."""
    (count,) = _COUNT.unpack((yield from read_exactly(sock, _COUNT.size)))
    if not 0 < count <= _MOST_PARTS:
        raise ProtocolError(f"A packet has 1 to {_MOST_PARTS} parts, and one of {count} was announced.")
    sizes = struct.unpack(f"<{count}Q", (yield from read_exactly(sock, 8 * count)))
    if max(sizes) > MAX_FRAME_BYTES:
        raise ProtocolError(f"A part has up to {MAX_FRAME_BYTES} bytes, and one of {max(sizes)} was announced.")
    packet: Packet = []
    for size in sizes:
        # A bytearray would be filled with zeros first.
        part = bytearray(size) if size <= _SMALL_BYTES else np.empty(size, dtype=np.uint8).data
        yield from read_into(sock, memoryview(part))
        packet.append(part)
    return packet
