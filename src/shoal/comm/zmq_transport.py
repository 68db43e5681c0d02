"""The ZeroMQ transport: messages over Unix sockets, or over TCP."""

from __future__ import annotations

from shoal.comm.linked import LinkedTransport
from shoal.comm.reliable import Reliability
from shoal.comm.security import RunKey
from shoal.comm.transport import Roster
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import SpecError

# Whoever is turned away is lost to a transport, and peers come in when it polls, which may be after a long step.
_HANDSHAKE_S = 300.0


class ZmqTransport(LinkedTransport):
    """Messages over ZeroMQ. Binds when made; `connect` once the addresses of all are known.

    `address` is as a `ZmqWire` takes it. Peers are those with the same `key`.
    """

    def __init__(
        self,
        rank: int,
        *,
        key: RunKey,
        address: str = "tcp://127.0.0.1:*",
        generation: int = 0,
        reliability: Reliability | None = None,
    ) -> None:
        reliability = reliability or Reliability()
        self._zmq = ZmqWire(address, key=key, linger_s=reliability.linger_s, handshake_s=_HANDSHAKE_S)
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
