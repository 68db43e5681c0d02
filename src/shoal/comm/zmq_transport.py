"""The transport between processes: messages over Unix sockets, or over tcp."""

from __future__ import annotations

from shoal.comm.linked import LinkedTransport
from shoal.comm.reliable import Reliability
from shoal.comm.security import RunKey
from shoal.comm.tcp.pacing import HostCable
from shoal.comm.transport import Roster
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import SpecError


class ZmqTransport(LinkedTransport):
    """Messages over a `ZmqWire`. Binds when made; `connect` once the addresses of all are known.

    `address`, `encrypt` and `cable` are as the wire takes them. Peers are those with the same `key`.
    """

    def __init__(
        self,
        rank: int,
        *,
        key: RunKey,
        address: str = "tcp://127.0.0.1:*",
        generation: int = 0,
        reliability: Reliability | None = None,
        encrypt: bool | None = None,
        cable: HostCable | None = None,
    ) -> None:
        reliability = reliability or Reliability()
        self._zmq = ZmqWire(address, key=key, linger_s=reliability.linger_s, encrypt=encrypt, cable=cable)
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
