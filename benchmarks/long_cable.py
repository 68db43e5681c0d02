"""A cable between two switches in which every frame takes its time.

`python -m benchmarks.long_cable TAP TAP SECONDS` is for kernels that cannot delay packets themselves. Each end is
a network device of this process; frames that come in at one go out at the other so many seconds later, in their
order. It prints a line when it is ready.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

_SET_DEVICE = 0x400454CA
_FRAMES_WITHOUT_HEADER = 0x0002 | 0x1000
_LONGEST = 65536


def open_end(name: str) -> int:
    """A device of this name, which is there as long as this process."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_DEVICE, struct.pack("16sH", name.encode(), _FRAMES_WITHOUT_HEADER))
    return end


def carry(ends: Sequence[int], delay_s: float) -> None:
    """For ever."""
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        dues = [frames[0][0] for frames in under_way.values() if frames]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        now = time.monotonic()
        for end in ready:
            try:
                while True:
                    under_way[other[end]].append((now + delay_s, os.read(end, _LONGEST)))
            except BlockingIOError:
                pass
        for end, frames in under_way.items():
            while frames and frames[0][0] <= now:
                try:
                    os.write(end, frames.popleft()[1])
                except OSError:  # a device that is not up yet loses frames, as a cable does
                    pass


if __name__ == "__main__":
    devices = [open_end(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(devices, float(sys.argv[3]))
