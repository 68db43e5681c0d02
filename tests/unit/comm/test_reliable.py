"""The link's state machine on a simulated wire and clock: whatever the wire does, each message comes once."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.codec import Message
from shoal.comm.envelope import Envelope, PacketKind
from shoal.comm.reliable import Link, Packet, Reliability
from shoal.comm.transport import TransportCounters
from shoal.errors import ProtocolError

RELIABILITY = Reliability(window=8, acknowledge_every=4, acknowledge_after_s=0.01, resend_after_s=0.1)


class Simulation:
    """Two links, a wire that misbehaves by dice, and a clock that jumps to what happens next."""

    def __init__(self, *, drop: float, duplicate: float, delay: float, corrupt: float, seed: int) -> None:
        self.dice = random.Random(seed)
        self.drop, self.duplicate, self.delay, self.corrupt = drop, duplicate, delay, corrupt
        self.now = 0.0
        self.counters = [TransportCounters(), TransportCounters()]
        self.links = [
            Link(rank, 1 - rank, generation=0, reliability=RELIABILITY, counters=self.counters[rank])
            for rank in (0, 1)
        ]
        self.delivered: list[list[int]] = [[], []]
        self.wire: list[tuple[float, int, int, Packet]] = []
        self._order = itertools.count()

    def exchange(self, count: int) -> None:
        """Both sides send `count` messages and go on until everything is acknowledged."""
        remaining = [iter(range(count)), iter(range(count))]
        for _ in range(200_000):
            for link, numbers in zip(self.links, remaining, strict=True):
                while not link.is_full and (number := next(numbers, None)) is not None:
                    link.send(Message("number", {"n": number}, [b"payload"]), self.now)
            self._carry()
            if not self.wire and not any(link.under_way for link in self.links):
                return
            self._advance()
        raise AssertionError("the links never came to rest")

    def _carry(self) -> None:
        for rank, link in enumerate(self.links):
            while link.outbox:
                packet = link.outbox.popleft()
                if self.dice.random() < self.drop:
                    continue
                for _ in range(1 + (self.dice.random() < self.duplicate)):
                    late = self.dice.random() if self.dice.random() < self.delay else 0.001
                    copied = self._damage([bytearray(buffer) for buffer in packet])
                    heapq.heappush(self.wire, (self.now + late, next(self._order), 1 - rank, copied))

    def _damage(self, buffers: list[bytearray]) -> list[bytearray]:
        if self.dice.random() < self.corrupt:
            victim = self.dice.choice(buffers)
            victim[self.dice.randrange(len(victim))] ^= 1
        return buffers

    def _advance(self) -> None:
        arrival = self.wire[0][0] if self.wire else float("inf")
        self.now = min(arrival, *(link.wakeup for link in self.links))
        if self.wire and arrival <= self.now:
            _, _, rank, packet = heapq.heappop(self.wire)
            try:
                envelope = Envelope.unpack(packet[0])
            except ProtocolError:
                envelope = None
            if envelope is not None:
                messages = self.links[rank].on_packet(envelope, packet[1:], self.now)
                self.delivered[rank] += [message.fields["n"] for message in messages]
        for link in self.links:
            link.on_tick(self.now)


probabilities = st.floats(0, 0.35)


@settings(deadline=None, max_examples=60)
@given(probabilities, probabilities, probabilities, probabilities, st.integers(0, 2**32))
def test_every_message_is_delivered_once_in_order(drop, duplicate, delay, corrupt, seed):
    simulation = Simulation(drop=drop, duplicate=duplicate, delay=delay, corrupt=corrupt, seed=seed)
    simulation.exchange(30)
    assert simulation.delivered == [list(range(30)), list(range(30))]


def test_faults_are_counted():
    simulation = Simulation(drop=0.2, duplicate=0.2, delay=0.2, corrupt=0.2, seed=1)
    simulation.exchange(100)
    for counters in simulation.counters:
        assert (counters.sent, counters.received) == (100, 100)
        assert min(counters.refused, counters.repeated, counters.duplicates) > 0


def test_a_good_wire_costs_few_acknowledgements():
    simulation = Simulation(drop=0, duplicate=0, delay=0, corrupt=0, seed=1)
    sender, receiver = simulation.links
    packets = 0
    for number in range(40):
        sender.send(Message("number", {"n": number}), 0.0)
        envelope, *buffers = sender.outbox.popleft()
        receiver.on_packet(Envelope.unpack(envelope), buffers, 0.0)
        while receiver.outbox:
            packets += 1
            sender.on_packet(Envelope.unpack(receiver.outbox.popleft()[0]), [], 0.0)
    assert packets == 40 // RELIABILITY.acknowledge_every
    assert sender.under_way == 0 and simulation.counters[0].repeated == 0


def pair() -> tuple[Link, Link, TransportCounters]:
    counters = TransportCounters()
    return (
        Link(0, 1, generation=0, reliability=RELIABILITY, counters=TransportCounters()),
        Link(1, 0, generation=0, reliability=RELIABILITY, counters=counters),
        counters,
    )


def test_a_damaged_frame_is_refused_counted_and_asked_for_again():
    sender, receiver, counters = pair()
    sender.send(Message("k", {}, [b"payload"]), 0.0)
    envelope, header, _frame = sender.outbox.popleft()
    assert receiver.on_packet(Envelope.unpack(envelope), [header, b"pAyload"], 0.0) == []
    assert counters.refused == 1
    request = Envelope.unpack(receiver.outbox.popleft()[0])
    assert (request.kind, request.sequence) == (PacketKind.REPEAT, 1)
    sender.on_packet(request, [], 0.0)
    envelope, *buffers = sender.outbox.popleft()
    (message,) = receiver.on_packet(Envelope.unpack(envelope), buffers, 0.0)
    assert bytes(message.frames[0]) == b"payload"


def test_a_repeat_of_what_arrived_may_show_changed_memory():
    sender, receiver, counters = pair()
    memory = bytearray(b"payload")
    sender.send(Message("k", {}, [memory]), 0.0)
    envelope, *buffers = sender.outbox.popleft()
    assert len(receiver.on_packet(Envelope.unpack(envelope), buffers, 0.0)) == 1
    memory[:] = b"changed"
    sender.on_tick(RELIABILITY.resend_after_s)
    envelope, *buffers = sender.outbox.popleft()
    assert receiver.on_packet(Envelope.unpack(envelope), buffers, 0.0) == []
    assert (counters.duplicates, counters.refused) == (1, 0)


def test_a_message_that_is_always_damaged_is_an_error_and_not_a_loop():
    sender, receiver, _ = pair()
    memory = bytearray(b"payload")
    sender.send(Message("k", {}, [memory]), 0.0)
    memory[:] = b"changed"
    with pytest.raises(ProtocolError, match="call flush"):
        for _ in range(RELIABILITY.max_refusals + 1):
            envelope, *buffers = sender.outbox.popleft()
            receiver.on_packet(Envelope.unpack(envelope), buffers, 0.0)
            sender.on_packet(Envelope.unpack(receiver.outbox.popleft()[0]), [], 0.0)


def test_a_number_far_ahead_takes_no_memory():
    _, receiver, counters = pair()
    far = Envelope(PacketKind.GOODBYE, 0, 0, 2**60, 0)
    assert receiver.on_packet(far, [], 0.0) == []
    assert counters.refused == 1 and not receiver.outbox and not receiver.peer_left
