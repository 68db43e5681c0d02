"""Bytes that leave a host as slowly as over somebody's network: a bucket of tokens that its processes share.

A piece of a packet has the host's only cable to itself for as long as the bandwidth says, and is written to the
socket when it would have come through a cable of that latency. Nobody sees a difference but in time.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.comm.reliable import Packet
from shoal.comm.security import leaves_host
from shoal.comm.tcp.addresses import target_of
from shoal.comm.tcp.packets import runs_of
from shoal.comm.tcp.window import Window
from shoal.spec import World
from shoal.spec.link import SEGMENT_BYTES, NetworkLink

PIECE_BYTES = 64 << 10
_LOSSY_PIECE_S = 5e-4
"""Where packets are lost, a piece is what passes in this time: what may be on its way are but few packets."""
AHEAD_S = 0.01
"""So early a piece may be let in: else the cable would be idle while a thread wakes up."""
_TIME = struct.Struct("<d")
_FILE = "link"


class Booking(NamedTuple):
    """When a piece has the cable."""

    ends_at: float
    """When the cable is free for the next."""
    arrives_at: float


class HostCable:
    """What all processes of a host send through. The file says until when it is taken, by a clock that all of the
    host have."""

    def __init__(self, link: NetworkLink, path: Path) -> None:
        self.link = link
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _TIME.size)
        self._taken = mmap.mmap(self._fd, _TIME.size)
        self.chance = np.random.default_rng()

    def take(self, count: int, now: float) -> Booking:
        """Let so many bytes in, behind all that were let in before."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            (taken_until,) = _TIME.unpack_from(self._taken)
            ends_at = max(taken_until, now) + count / self.link.bandwidth
            _TIME.pack_into(self._taken, 0, ends_at)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return Booking(ends_at, ends_at + self.link.latency)

    def reaches(self, address: str, own: str) -> bool:
        """Whether what is sent there goes through it: all of it where one machine stands for several hosts."""
        if not leaves_host(address):
            return True
        return target_of(address)[1][0] != target_of(own)[1][0]

    def close(self) -> None:
        """Other processes go on with it."""
        self._taken.close()
        os.close(self._fd)


class _Passing(NamedTuple):
    arrives_at: float
    content: memoryview
    ends_packet: bool


class Passage:
    """The packets of one connection on their way through a cable."""

    def __init__(self, cable: HostCable, queue: deque[Packet]) -> None:
        self._cable, self._queue = cable, queue
        self._under_way: deque[_Passing] = deque()
        self._begun = 0
        """Packets at the head of the queue that are under way, the last of them perhaps in part."""
        self._rest: Iterator[memoryview] = iter(())
        self._next: memoryview | None = None
        self._free_at = 0.0
        """When the next piece may be let in."""
        self._last_at = 0.0
        self._window = Window(cable.link, cable.chance) if cable.link.loss else None

    def due_at(self) -> float:
        """When there is something to do; never, where nothing was queued."""
        dues = [self._under_way[0].arrives_at] if self._under_way else []
        if self._next is not None or len(self._queue) > self._begun:
            dues.append(self._free_at - AHEAD_S)
        return min(dues, default=math.inf)

    def arrived(self) -> _Passing | None:
        """The next piece that has come through, in the order in which all were queued."""
        now = time.monotonic()
        self._begin(now)
        if not self._under_way or self._under_way[0].arrives_at > now:
            return None
        return self._under_way.popleft()

    def packet_is_over(self) -> None:
        """All of the first packet has been written."""
        self._queue.popleft()
        self._begun -= 1

    def _begin(self, now: float) -> None:
        """Let pieces in, as long as it is time for that."""
        while now >= self._free_at - AHEAD_S and (piece := self._piece()) is not None:
            if self._window is not None and (opens_at := self._window.opens_at(_packets(piece), now)) > now:
                self._free_at = opens_at + AHEAD_S
                return
            booked = self._cable.take(len(piece), now)
            self._free_at = booked.ends_at
            self._next = next(self._rest, None)
            self._last_at = max(self._last_at, self._arrival(piece, booked.arrives_at))
            self._under_way.append(_Passing(self._last_at, piece, self._next is None))

    def _arrival(self, piece: memoryview, arrives_at: float) -> float:
        """When all of a piece is there, with what had to be sent again."""
        if self._window is None:
            return arrives_at
        is_last = self._next is None and len(self._queue) == self._begun
        return self._window.let_out(_packets(piece), arrives_at, is_last=is_last)

    def _piece(self) -> memoryview | None:
        if self._next is None and len(self._queue) > self._begun:
            self._rest = _pieces(self._queue[self._begun], _piece_bytes(self._cable.link))
            self._begun += 1
            self._next = next(self._rest)
        return self._next


def _pieces(packet: Packet, size: int) -> Iterator[memoryview]:
    for run in runs_of(packet):
        view = memoryview(run)
        for at in range(0, len(view), size):
            yield view[at : at + size]


def _piece_bytes(link: NetworkLink) -> int:
    if not link.loss or math.isinf(link.bandwidth):
        return PIECE_BYTES
    packets = int(link.bandwidth * _LOSSY_PIECE_S) // SEGMENT_BYTES
    return min(max(1, packets) * SEGMENT_BYTES, PIECE_BYTES)


def _packets(piece: memoryview) -> int:
    return -(-len(piece) // SEGMENT_BYTES)


def cable_of(world: World) -> HostCable | None:
    """The one of this process's host; None where the network is as fast as it is."""
    if not world.link or not world.is_spread:
        return None
    return HostCable(NetworkLink.parse(world.link), Path(world.sockets, _FILE))
