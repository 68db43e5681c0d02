"""Strangers at ports of a run: `python strangers.py COUNT HOST PORT …` prints what became of so many at each."""

from __future__ import annotations

import json
import resource
import secrets
import socket
import sys
from collections import Counter
from contextlib import closing, suppress

GUARD_S = 60.0
SAID = [
    b"",
    b"shoal-1\ne" + bytes(10),
    b"shoal-1\ne" + bytes(32) + bytes(32),
    secrets.token_bytes(5_000),
    bytes(200_000),
]
"""Silent, slow, without the key, garbage, a lot of it."""


def besiege(host: str, port: int, count: int) -> Counter[str]:
    """All at once, and each stays as long as it is let."""
    callers = []
    for number in range(count):
        caller = socket.create_connection((host, port), timeout=GUARD_S)
        with suppress(OSError):
            caller.send(SAID[number % len(SAID)])
        callers.append(caller)
    return Counter(map(_end_of, callers))


def _end_of(caller: socket.socket) -> str:
    """A listener shows its own proof to whoever says hello, and hangs up when it gets none."""
    with closing(caller):
        try:
            while caller.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return "let in"
    return "hung up on"


if __name__ == "__main__":
    number, address, *ports = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: Counter[str] = Counter()
    for one in ports:
        found += besiege(address, int(one), int(number))
    print(json.dumps(found))
