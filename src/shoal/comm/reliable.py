"""One link between two processes, made reliable: a state machine without sockets or clocks.

It is fed with messages, packets and the time, and says what to put on the wire. Every message gets a number
and is kept until the peer acknowledged it. A packet that fails its checksum, or is missing before a later
one, is asked for again; what stays unacknowledged is sent again; what comes twice is dropped. So every
message is delivered once and in order, whatever the wire drops, delays, repeats or damages.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

from shoal.comm.codec import Buffer, Message, decode, encode
from shoal.comm.envelope import Envelope, PacketKind
from shoal.comm.transport import TransportCounters
from shoal.errors import ProtocolError

Packet = list[Buffer]
"""What goes over the wire in one piece: an envelope, then a message's buffers if there is one."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How patient a link is. The defaults suit a wire that keeps its promises, as TCP does."""

    window: int = 256
    """Messages that may be under way, unacknowledged."""
    acknowledge_every: int = 8
    """Acknowledge at the latest after so many messages; every packet that goes back does it for free."""
    acknowledge_after_s: float = 0.01
    """… or after so long."""
    resend_after_s: float = 1.0
    """Send the oldest message again when nothing was acknowledged for so long; doubles up to 8 times."""
    max_refusals: int = 16
    """Give up on a message that arrived damaged so often: its sender changes it while it is under way."""
    linger_s: float = 1.0
    """How long closing waits for what is under way."""
    await_goodbyes: bool = False
    """Stay until the peers leave too: on a lossy wire our last acknowledgement may have to be repeated."""


class Link:
    """This process's end of the link to one peer."""

    def __init__(
        self, rank: int, peer: int, *, generation: int, reliability: Reliability, counters: TransportCounters
    ) -> None:
        self.peer = peer
        self.peer_left = False
        """Whether the peer said goodbye; nothing more will come."""
        self.outbox: deque[Packet] = deque()
        """Packets to put on the wire now."""
        self._rank = rank
        self._generation = generation
        self._reliability = reliability
        self._counters = counters
        self._last_sent = 0
        self._unacknowledged: dict[int, tuple[PacketKind, list[Buffer]]] = {}
        self._resend_at = math.inf
        self._patience_s = reliability.resend_after_s
        self._next_expected = 1
        self._early: dict[int, Message | None] = {}
        self._gap_asked = 0
        self._refusals: Counter[int] = Counter()
        self._owed = 0
        self._acknowledge_at = math.inf

    @property
    def is_full(self) -> bool:
        """Whether the window is used up: send no more before an acknowledgement."""
        return len(self._unacknowledged) >= self._reliability.window

    @property
    def under_way(self) -> int:
        """Messages sent and not yet acknowledged."""
        return len(self._unacknowledged)

    @property
    def wakeup(self) -> float:
        """When `on_tick` has something to do."""
        return min(self._resend_at, self._acknowledge_at)

    def send(self, message: Message, now: float) -> None:
        """Number a message and put it into the outbox."""
        self._enqueue(PacketKind.MESSAGE, encode(message), now)
        self._counters.sent += 1

    def say_goodbye(self, now: float) -> None:
        """Tell the peer that nothing follows."""
        self._enqueue(PacketKind.GOODBYE, [], now)

    def acknowledge(self) -> None:
        """Tell the peer now what has arrived, if it does not know yet."""
        if self._owed:
            self._put(PacketKind.ACKNOWLEDGE, 0, [])

    def on_tick(self, now: float) -> None:
        """Do what has become due: acknowledge, or send the oldest message again."""
        if now >= self._acknowledge_at:
            self.acknowledge()
        if now >= self._resend_at:
            self._resend(next(iter(self._unacknowledged)))
            self._patience_s = min(self._patience_s * 2, self._reliability.resend_after_s * 8)
            self._resend_at = now + self._patience_s

    def on_packet(self, envelope: Envelope, buffers: list[Buffer], now: float) -> list[Message]:
        """Take in a packet; returns the messages that can be delivered now, in order."""
        self._on_acknowledged(envelope.acknowledged, now)
        if envelope.kind is PacketKind.REPEAT:
            if envelope.sequence in self._unacknowledged:
                self._resend(envelope.sequence)
            return []
        if envelope.kind is PacketKind.ACKNOWLEDGE:
            return []
        return self._on_numbered(envelope, buffers, now)

    def _on_numbered(self, envelope: Envelope, buffers: list[Buffer], now: float) -> list[Message]:
        sequence = envelope.sequence
        # Before the checksum: a repeat of what we have may show memory its sender has since reused.
        if sequence < self._next_expected or sequence in self._early:
            self._counters.duplicates += 1
            self._owed += 1
            self.acknowledge()
            return []
        if sequence >= self._next_expected + 2 * self._reliability.window:
            self._counters.refused += 1
            return []
        try:
            message = decode(buffers) if envelope.kind is PacketKind.MESSAGE else None
        except ProtocolError as damage:
            self._refuse(sequence, damage)
            return []
        self._early[sequence] = message
        if sequence != self._next_expected:
            self._ask_for_gap()
            return []
        return self._deliver(now)

    def _deliver(self, now: float) -> list[Message]:
        delivered: list[Message] = []
        while self._next_expected in self._early:
            message = self._early.pop(self._next_expected)
            del self._refusals[self._next_expected]
            self._next_expected += 1
            self._owed += 1
            if message is None:
                self.peer_left = True
            else:
                delivered.append(message)
        self._counters.received += len(delivered)
        if self._early:
            self._ask_for_gap()
        if self._owed >= self._reliability.acknowledge_every or self.peer_left:
            self.acknowledge()
        elif self._owed:
            self._acknowledge_at = min(self._acknowledge_at, now + self._reliability.acknowledge_after_s)
        return delivered

    def _refuse(self, sequence: int, damage: ProtocolError) -> None:
        self._counters.refused += 1
        self._refusals[sequence] += 1
        if self._refusals[sequence] > self._reliability.max_refusals:
            raise ProtocolError(
                f"Message {sequence} from rank {self.peer} arrived damaged {self._refusals[sequence]} times "
                f"({damage}) Its sender probably changes a tensor that is under way; call flush() before.",
                peer=str(self.peer),
            )
        self._put(PacketKind.REPEAT, sequence, [])

    def _ask_for_gap(self) -> None:
        """Ask once for the first missing message; should that get lost, the sender's patience ends."""
        if self._gap_asked != self._next_expected:
            self._gap_asked = self._next_expected
            self._put(PacketKind.REPEAT, self._next_expected, [])

    def _on_acknowledged(self, acknowledged: int, now: float) -> None:
        progressed = False
        while self._unacknowledged and (oldest := next(iter(self._unacknowledged))) <= acknowledged:
            del self._unacknowledged[oldest]
            progressed = True
        if progressed:
            self._patience_s = self._reliability.resend_after_s
            self._resend_at = now + self._patience_s if self._unacknowledged else math.inf

    def _enqueue(self, kind: PacketKind, buffers: list[Buffer], now: float) -> None:
        self._last_sent += 1
        if not self._unacknowledged:
            self._resend_at = now + self._patience_s
        self._unacknowledged[self._last_sent] = (kind, buffers)
        self._put(kind, self._last_sent, buffers)

    def _resend(self, sequence: int) -> None:
        kind, buffers = self._unacknowledged[sequence]
        self._counters.repeated += 1
        self._put(kind, sequence, buffers)

    def _put(self, kind: PacketKind, sequence: int, buffers: list[Buffer]) -> None:
        """Every packet acknowledges, whatever else it is for."""
        envelope = Envelope(kind, self._rank, self._generation, sequence, self._next_expected - 1)
        self.outbox.append([envelope.pack(), *buffers])
        self._owed = 0
        self._acknowledge_at = math.inf
