"""A process that does calls: the script that `CallPool` starts. It calls who has them, on its host or another."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from typing import Any

import cloudpickle

from shoal.comm.security import RunKey
from shoal.errors import PeerLost
from shoal.roles.process.station import current_station
from shoal.sklearn.call_lines import CallLine, NetworkLine, UnixLine
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
    with closing(_line()) as line, suppress(PeerLost):
        line.send(os.environ["SHOAL_RANK"].encode())
        while True:
            line.send(_written(*answer(line.receive())))


def _line() -> CallLine:
    station = current_station()
    assert station is not None
    if station.world.secret:
        return NetworkLine.call(station.world.coordinator_address, RunKey.from_text(station.world.secret))
    return UnixLine.call(os.path.join(os.environ[SOCKETS_VARIABLE], SOCKET))


def _written(went_well: bool, result: Any) -> bytes:
    try:
        return cloudpickle.dumps((went_well, result))
    except Exception as error:  # What cannot travel must not end the process.
        return cloudpickle.dumps((False, RuntimeError(f"The call's result cannot be pickled: {error!r}")))


if __name__ == "__main__":
    main()
