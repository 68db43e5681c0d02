"""A process that does calls: the script that `CallPool` starts. It asks at a socket of its run's own folder."""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from typing import Any

import cloudpickle

from shoal.spec.world import SOCKETS_VARIABLE

SOCKET = "calls"


def answer(content: bytes) -> tuple[bool, Any]:
    """Whether a call came to an end, and what it returned or raised."""
    try:
        return True, cloudpickle.loads(content)()
    except Exception as error:
        return False, error


def main() -> None:
    """Do calls until nobody has any more."""
    with Client(os.path.join(os.environ[SOCKETS_VARIABLE], SOCKET), "AF_UNIX") as line:
        line.send(int(os.environ["SHOAL_RANK"]))
        while True:
            try:
                content = line.recv_bytes()
            except EOFError:
                return
            line.send_bytes(_written(*answer(content)))


def _written(went_well: bool, result: Any) -> bytes:
    try:
        return cloudpickle.dumps((went_well, result))
    except Exception as error:  # What cannot travel must not end the process.
        return cloudpickle.dumps((False, RuntimeError(f"The call's result cannot be pickled: {error!r}")))


if __name__ == "__main__":
    main()
