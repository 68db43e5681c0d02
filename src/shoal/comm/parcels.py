"""Bulk between two processes of one host: buffers in a memory file, whose descriptor travels with a message."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from shoal.errors import ProtocolError


@contextmanager
def packed(buffers: Iterable[object]) -> Iterator[int]:
    """The descriptor of a memory file in which these lie one behind the other."""
    with os.fdopen(os.memfd_create("shoal-parcel"), "wb") as file:
        for buffer in buffers:
            file.write(buffer)  # type: ignore[arg-type]
        file.flush()
        yield file.fileno()


def unpacked(fds: list[int], sizes: Sequence[int]) -> list[memoryview]:
    """The buffers of these sizes that `packed` put there. They may be written to; the descriptors are closed."""
    total, found = sum(sizes), [os.fstat(fd).st_size for fd in fds]
    try:
        if len(fds) != 1 or min(sizes, default=0) < 0 or found[0] < total:
            raise ProtocolError(
                f"a parcel should hold {total} bytes, but there are {found} of them; it is refused."
            )
        memory = memoryview(mmap.mmap(fds[0], total, access=mmap.ACCESS_COPY) if total else bytearray())
    finally:
        for fd in fds:
            os.close(fd)
    ends = list(accumulate(sizes))
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
