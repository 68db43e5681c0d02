"""Buffers travel as a memory file, whatever they hold, and what is no such file is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shoal.comm.parcels import packed, unpacked
from shoal.errors import ProtocolError


def test_buffers_arrive_as_they_were() -> None:
    given = [b"abc", np.arange(6, dtype=np.int16).reshape(2, 3), b"", memoryview(b"end")]
    sizes = [memoryview(buffer).nbytes for buffer in given]
    with packed(given) as fd:
        found = unpacked([os.dup(fd)], sizes)
    assert [bytes(buffer) for buffer in found] == [bytes(buffer) for buffer in given]
    found[0][:1] = b"x"  # whoever has it may change it
    assert bytes(found[0]) == b"xbc"


def test_nothing_is_a_parcel_too() -> None:
    with packed([b""]) as fd:
        assert unpacked([os.dup(fd)], [0]) == [b""]


@pytest.mark.parametrize("sizes", [[4], [5, -2], [3, 1]])
def test_what_is_not_all_there_is_refused_and_closed(sizes: list[int]) -> None:
    with packed([b"abc"]) as fd:
        copy = os.dup(fd)
        with pytest.raises(ProtocolError, match="a parcel should hold"):
            unpacked([copy], sizes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)
    with pytest.raises(ProtocolError):
        unpacked([], [1])
