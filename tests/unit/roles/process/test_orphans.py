"""A process of somebody else's launcher does not wait for ever once that launcher is gone."""

from __future__ import annotations

import os
import select

import pytest

from shoal.arena import Segment, counter_bytes
from shoal.errors import PeerLost
from shoal.roles.process.joining import orphan_watch

GUARD_S = 30


def test_a_waiting_orphan_notices() -> None:
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        looked, look = os.pipe()
        if os.fork() == 0:
            _wait_for_nobody(tell, look)
        os.read(looked, 1)
        os._exit(0)  # the launcher ends, and leaves its process waiting
    os.close(tell)
    os.waitpid(parent, 0)
    try:
        assert select.select([told], [], [], GUARD_S)[0], "the orphan still waits"
        assert os.read(told, 100) == b"has ended"
    finally:
        os.close(told)


def _wait_for_nobody(tell: int, look: int) -> None:
    try:
        segment = Segment()
        segment.reserve("counters", counter_bytes(1))
        segment.map()
        watch = orphan_watch()
        os.write(look, b"!")
        with pytest.raises(PeerLost, match="has ended"):
            segment.counters("counters", watch).wait(0, 1)
        os.write(tell, b"has ended")
    finally:
        os._exit(1)
