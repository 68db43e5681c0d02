"""The transport contract: how messages move between the processes of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from shoal.comm.codec import Message

Roster = Mapping[int, str]
"""Where every process listens: rank -> address."""


@dataclass
class TransportCounters:
    """What went over a transport so far."""

    sent: int = 0
    """Messages handed to `send`."""
    received: int = 0
    """Messages delivered, each once."""
    refused: int = 0
    """Packets dropped because a checksum, a bound or the generation was wrong."""
    repeated: int = 0
    """Packets sent again, because the peer asked or did not acknowledge in time."""
    duplicates: int = 0
    """Packets dropped because their message had been delivered before."""
    strangers: int = 0
    """Connections that ended without having shown the run's key."""


class Transport(Protocol):
    """Messages between addressed peers: each arrives once, whole, and in the order its sender sent it.

    All progress happens inside calls, by one thread at a time. Tensors are sent from where they lie: leave
    their memory alone until `flush` returns, or until an answer shows that they arrived.
    """

    rank: int
    counters: TransportCounters

    @property
    def peers(self) -> frozenset[int]:
        """The ranks this transport can send to."""
        ...

    def send(self, peer: int, message: Message) -> None:
        """Send; returns once queued. Raises `PeerLost` where the peer has left or vanished."""
        ...

    def receive(self, timeout_s: float, *, awaited: int | None = None) -> tuple[int, Message]:
        """The next message from anyone, and its sender; `CommTimeout` after `timeout_s` without one.

        Raises `PeerLost` once for each peer that vanished without a goodbye, and where nothing more can
        come: from the `awaited` peer, or from anybody.
        """
        ...

    def under_way(self, peer: int) -> int:
        """Messages to a peer that may not have arrived."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Return once the peers have everything sent so far."""
        ...

    def close(self) -> None:
        """Say goodbye and leave; waits a bounded time for what is still under way."""
        ...

    def abort(self) -> None:
        """Leave at once, as a crash would: nothing is waited for, and peers see a loss."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`, or `abort` where an exception is on its way."""
        ...
