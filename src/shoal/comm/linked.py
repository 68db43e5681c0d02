"""What every transport shares: reliable links over some wire, driven by the caller's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Protocol, Self

from shoal.comm.codec import Message
from shoal.comm.envelope import Envelope
from shoal.comm.reliable import Link, Packet, Reliability
from shoal.comm.transport import TransportCounters
from shoal.errors import CommError, CommTimeout, PeerLost, ProtocolError

# A vanished peer makes no packet, so waiting pauses this often to look around.
_LOOK_EVERY_S = 0.1


class Wire(Protocol):
    """Moves packets between processes, and promises nothing about them."""

    @property
    def strangers(self) -> int:
        """Connections that ended without having shown the run's key."""
        ...

    def transmit(self, peer: int, packet: Packet) -> None:
        """Put a packet on its way without waiting."""
        ...

    def poll(self, timeout_s: float) -> Packet | None:
        """The next packet that arrived, from anyone; waits up to `timeout_s`."""
        ...

    def gone(self) -> Collection[int]:
        """Peers that are known to be there no more."""
        ...

    def close(self) -> None:
        """Take the wire down."""
        ...


class LinkedTransport:
    """A `Transport` over a `Wire`: the reliable links, the waiting, and who is still there."""

    def __init__(self, rank: int, wire: Wire, *, generation: int, reliability: Reliability) -> None:
        self.rank = rank
        self.counters = TransportCounters()
        self._wire = wire
        self._generation = generation
        self._reliability = reliability
        self._links: dict[int, Link] = {}
        self._delivered: deque[tuple[int, Message]] = deque()
        self._reported_lost: set[int] = set()
        self._closed = False

    @property
    def peers(self) -> frozenset[int]:
        """The ranks this transport can send to."""
        return frozenset(self._links)

    def send(self, peer: int, message: Message, timeout_s: float = 60.0) -> None:
        """Send; waits only while the peer's window is full."""
        link = self._link(peer)
        deadline = time.monotonic() + timeout_s
        while link.is_full and not self._has_left(peer):
            self._pump(deadline)
            if link.is_full and time.monotonic() >= deadline:
                raise CommTimeout(
                    f"Rank {peer} acknowledged nothing for {timeout_s} s with {link.under_way} messages "
                    "under way; it hangs or has stopped receiving.",
                    peer=str(peer),
                )
        if self._has_left(peer):
            raise PeerLost(f"Rank {peer} has left; nothing can be sent to it.", peer=str(peer))
        link.send(message, time.monotonic())
        self._transmit_outbox(link)

    def receive(self, timeout_s: float, *, awaited: int | None = None) -> tuple[int, Message]:
        """The next message from anyone, and its sender."""
        deadline = time.monotonic() + timeout_s
        while not self._delivered:
            self._check_open()
            self._raise_if_lost(awaited)
            self._pump(deadline)
            if not self._delivered and time.monotonic() >= deadline:
                whom = "any peer" if awaited is None else f"rank {awaited}"
                raise CommTimeout(
                    f"No message from {whom} arrived at rank {self.rank} within {timeout_s} s.",
                    peer=None if awaited is None else str(awaited),
                )
        return self._delivered.popleft()

    def under_way(self, peer: int) -> int:
        """Messages to a peer that may not have arrived."""
        return self._link(peer).under_way

    def flush(self, timeout_s: float) -> None:
        """Return once the peers have everything sent so far."""
        deadline = time.monotonic() + timeout_s
        for link in self._links.values():
            # They may be flushing too, and then only wait for this.
            link.acknowledge()
            self._transmit_outbox(link)
        while late := [peer for peer, link in self._links.items() if link.under_way]:
            if lost := [peer for peer in late if peer in self._wire.gone()]:
                raise PeerLost(f"Rank {lost[0]} left before it had everything.", peer=str(lost[0]))
            if time.monotonic() >= deadline:
                raise CommTimeout(
                    f"Ranks {late} did not acknowledge everything within {timeout_s} s; they hang or have "
                    "stopped receiving.",
                    peer=str(late[0]),
                )
            self._pump(deadline)

    def close(self) -> None:
        """Say goodbye and leave; waits a bounded time for what is still under way."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._reliability.linger_s
        for link in self._links.values():
            link.say_goodbye(time.monotonic())
        try:
            while time.monotonic() < deadline and not all(map(self._is_settled, self._links.values())):
                self._pump(deadline)
        except CommError:
            pass  # Nobody is left to be told: the caller is done with this transport.
        finally:
            self._wire.close()

    def abort(self) -> None:
        """Leave at once, as a crash would."""
        if not self._closed:
            self._closed = True
            self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.abort()

    def _link_to(self, peers: Iterable[int]) -> None:
        for peer in peers:
            self._links[peer] = Link(
                self.rank,
                peer,
                generation=self._generation,
                reliability=self._reliability,
                counters=self.counters,
            )

    def _pump(self, deadline: float) -> None:
        """Take in at most one packet, waiting until `deadline` for it, and do what is due."""
        present = [link for peer, link in self._links.items() if peer not in self._wire.gone()]
        for link in present:
            self._transmit_outbox(link)
        now = time.monotonic()
        wakeup = min([deadline, now + _LOOK_EVERY_S, *(link.wakeup for link in present)])
        packet = self._wire.poll(max(0.0, wakeup - now))
        self.counters.strangers = self._wire.strangers
        now = time.monotonic()
        if packet is not None:
            self._take_in(packet, now)
        for link in present:
            link.on_tick(now)
            self._transmit_outbox(link)

    def _take_in(self, packet: Packet, now: float) -> None:
        try:
            envelope = Envelope.unpack(packet[0])
        except ProtocolError:
            self.counters.refused += 1
            return
        link = self._links.get(envelope.sender)
        if link is None or envelope.generation != self._generation:
            self.counters.refused += 1
            return
        self._delivered.extend((link.peer, message) for message in link.on_packet(envelope, packet[1:], now))

    def _transmit_outbox(self, link: Link) -> None:
        while link.outbox:
            self._wire.transmit(link.peer, link.outbox.popleft())

    def _link(self, peer: int) -> Link:
        self._check_open()
        if peer not in self._links:
            raise ProtocolError(
                f"Rank {self.rank} has no peer {peer}; it is connected to {sorted(self._links)}.",
                peer=str(peer),
            )
        return self._links[peer]

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError(f"The transport of rank {self.rank} is closed.")

    def _has_left(self, peer: int) -> bool:
        return peer in self._wire.gone() or self._links[peer].peer_left

    def _is_settled(self, link: Link) -> bool:
        if link.peer in self._wire.gone():
            return True
        return not link.under_way and (link.peer_left or not self._reliability.await_goodbyes)

    def _raise_if_lost(self, awaited: int | None) -> None:
        for peer in self._wire.gone():
            if not self._links[peer].peer_left and peer not in self._reported_lost:
                self._reported_lost.add(peer)
                raise PeerLost(f"Rank {peer} vanished without a goodbye.", peer=str(peer))
        if awaited is not None and self._link(awaited) and self._has_left(awaited):
            raise PeerLost(f"Rank {awaited} has left, but its message is awaited.", peer=str(awaited))
        if self._links and all(map(self._has_left, self._links)):
            raise PeerLost(f"Every peer of rank {self.rank} has left.")
