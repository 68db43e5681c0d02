"""torch's gloo listens for its peers at a port, asks nobody for a key, and never stops. Here it does: once the
peers of a group are connected, nobody else has to come in.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Makes gloo connect peers only when they first speak."""


@contextmanager
def only_meanwhile() -> Iterator[None]:
    """Close the ports that are opened inside this block at its end: what was connected there stays so."""
    before = _listeners()
    yield
    if os.environ.get(_LAZY, "0") not in ("", "0"):
        return
    for fd, _ in _listeners() - before:
        # Something at which nothing ever happens takes its place, so that its owner can still close it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as quiet:
            os.dup2(quiet.fileno(), fd, inheritable=False)


def _listeners() -> set[tuple[int, int]]:
    """Descriptors of this process at which others can connect over a network, and the sockets that they are."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # The one that listed this folder is gone.
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and _is_listening(fd):
                found.add((fd, status.st_ino))
    return found


def _is_listening(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as one:
        is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and one.family in (socket.AF_INET, socket.AF_INET6)
