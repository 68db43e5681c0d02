"""A cable between two switches in which every frame takes its time, and some are lost.

`python -m benchmarks.long_cable TAP TAP SECONDS [BYTES_PER_S [LOSS]]` is for kernels that cannot do that
themselves: it does what `tc qdisc … netem rate … delay … loss …` does. Each end is a network device of this
process; frames that come in at one go out at the other, in their order: each when those before it have left at
that rate, and so many seconds later. It prints a line when it is ready.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_SET_DEVICE = 0x400454CA
_FRAMES_WITHOUT_HEADER = 0x0002 | 0x1000
_LONGEST = 65536
_MOST_WAITING = 1000
"""Frames, as in netem: what comes to a full queue is lost."""


def open_end(name: str) -> int:
    """A device of this name, which is there as long as this process."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_DEVICE, struct.pack("16sH", name.encode(), _FRAMES_WITHOUT_HEADER))
    return end


@dataclass
class OneWay:
    """What is on its way to one end."""

    delay_s: float
    bytes_per_s: float
    loss: float
    chance: random.Random
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When each arrives."""
    free_at: float = 0.0
    """When all that came in before has left."""

    def let_in(self, frame: bytes, now: float) -> None:
        """A frame comes to the cable's beginning."""
        is_full = (
            self.free_at - now > 0 and len(self.frames) >= _MOST_WAITING + self.delay_s * self.bytes_per_s / 60
        )
        if is_full or (self.loss and self.chance.random() < self.loss):
            return
        self.free_at = max(now, self.free_at) + len(frame) / self.bytes_per_s
        self.frames.append((self.free_at + self.delay_s, frame))


def carry(ends: Sequence[int], ways: Sequence[OneWay]) -> None:
    """For ever."""
    towards = dict(zip(ends, ways, strict=True))
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        dues = [way.frames[0][0] for way in ways if way.frames]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        now = time.monotonic()
        for end in ready:
            try:
                while True:
                    towards[other[end]].let_in(os.read(end, _LONGEST), now)
            except BlockingIOError:
                pass
        for end, way in towards.items():
            while way.frames and way.frames[0][0] <= now:
                try:
                    os.write(end, way.frames.popleft()[1])
                except OSError:  # a device that is not up yet loses frames, as a cable does
                    pass


if __name__ == "__main__":
    devices = [open_end(name) for name in sys.argv[1:3]]
    delay_s, bytes_per_s, loss, *_ = [*map(float, sys.argv[3:]), *(math.inf, 0.0)[len(sys.argv) - 4 :]]
    print("ready", flush=True)
    carry(devices, [OneWay(delay_s, bytes_per_s, loss, random.Random(seed)) for seed in range(2)])
