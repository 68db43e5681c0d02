"""The ZeroMQ transport: TCP on loopback, or Unix sockets with abstract names, which leave no file behind."""

from __future__ import annotations

import os
import secrets

from shoal.comm.linked import LinkedTransport
from shoal.comm.reliable import Reliability
from shoal.comm.security import RunKey
from shoal.comm.transport import Roster
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import SpecError, unknown

_LOOPBACK = "127.0.0.1"


class ZmqTransport(LinkedTransport):
    """Messages over ZeroMQ. Binds when made; `connect` once the addresses of all are known.

    `via` is "tcp" (on loopback, `port` 0 for any free one) or "ipc". Peers are those with the same `key`.
    """

    def __init__(
        self,
        rank: int,
        *,
        key: RunKey,
        via: str = "tcp",
        port: int = 0,
        generation: int = 0,
        reliability: Reliability | None = None,
    ) -> None:
        reliability = reliability or Reliability()
        self._zmq = ZmqWire(bind_address(via, port), key=key, linger_s=reliability.linger_s)
        super().__init__(rank, self._zmq, generation=generation, reliability=reliability)

    @property
    def address(self) -> str:
        """Where this process listens; what others find in the roster."""
        return self._zmq.address

    def connect(self, roster: Roster) -> None:
        """Connect to everyone in the roster but ourselves."""
        if self._links:
            raise SpecError(f"Rank {self.rank} is connected already; make a new transport for a new roster.")
        peers = sorted(set(roster) - {self.rank})
        for peer in peers:
            self._zmq.connect(peer, roster[peer])
        self._link_to(peers)


def bind_address(via: str, port: int = 0) -> str:
    """Where a process of one host listens: "tcp" on loopback (any free port for 0), or "ipc"."""
    if via == "tcp":
        return f"tcp://{_LOOPBACK}:{port or '*'}"
    if via == "ipc":
        return f"ipc://@shoal-{os.getpid()}-{secrets.token_hex(8)}"
    raise unknown("transport", via, ("tcp", "ipc"))
