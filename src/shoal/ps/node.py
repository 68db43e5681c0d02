"""Drives a machine: takes messages off the wire, lets time pass, sends what the machine wants sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal.comm.codec import Buffer, Frame, Message, TooLarge, decode, encode
from shoal.comm.security import RunKey
from shoal.comm.tcp.pacing import cable_of
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import ProtocolError
from shoal.ps.contract import Machine
from shoal.ps.messages import COORDINATOR, Join, PsMessage, View
from shoal.ps.packing import pack, unpack
from shoal.spec import World

_RECONNECT_S = 0.05
_MOST_AT_ONCE = 256
"""Messages taken in one go before the outbox is emptied."""
_LONGEST_S = 0.1
"""And so long at most: with large shards, those messages would keep a server from answering, and from showing that
it moves, for as long as a hang is waited for."""


def open_wire(world: World, address: str) -> ZmqWire:
    """Where a member listens. At a port that is known beforehand somebody else may have been first: there all is
    encrypted."""
    encrypts = world.encrypts if world.is_spread else True if world.coordinator else None
    return ZmqWire(address, key=RunKey.from_text(world.secret), encrypt=encrypts, cable=cable_of(world))


class Node:
    """One member of the job on a real network. All of it happens inside calls, by one thread."""

    def __init__(self, number: int, machine: Machine, wire: ZmqWire, coordinator: str = "") -> None:
        self.number = number
        self.machine = machine
        self.wire = wire
        self.refused = 0
        """Packets that were no messages of ours."""
        self._addresses: dict[int, str] = {COORDINATOR: coordinator} if coordinator else {}
        self._connected: dict[int, str] = {}
        self._tried_at: dict[int, float] = {}
        self._term = 0
        """Of the newest view that came."""

    def pump(self, timeout_s: float) -> bool:
        """Send what is due, wait for news up to `timeout_s`, take it in; whether any came."""
        self._do_due()
        now = time.monotonic()
        packet = self.wire.poll(max(0.0, min(timeout_s, self.machine.wakeup - now)))
        heard = packet is not None
        until = time.monotonic() + _LONGEST_S
        taken = 0
        while packet is not None:
            self._take_in(packet)
            taken += 1
            goes_on = taken < _MOST_AT_ONCE and time.monotonic() < until
            packet = self.wire.poll(0.0) if goes_on else None
        self._do_due()
        return heard

    def wait(self, is_done: Callable[[], bool], on_idle: Callable[[], None] | None = None) -> None:
        """Pump until something has come true; `on_idle` is called now and then, and raises to give up."""
        while not is_done():
            self.pump(0.1)
            if on_idle is not None:
                on_idle()

    def flush(self) -> None:
        """Send what the machine has put out."""
        outgoing: dict[int, list[PsMessage]] = {}
        while self.machine.outbox:
            node, message = self.machine.outbox.popleft()
            self._learn(message)
            outgoing.setdefault(node, []).append(message)
        for node, messages in outgoing.items():
            if self._reach(node):
                for bundle in bundles(messages):
                    for packet in packets(self.number, bundle):
                        self.wire.transmit(node, packet)

    def follow_coordinator(self, address: str) -> None:
        """From now on the coordinator listens there."""
        self._addresses[COORDINATOR] = address

    def close(self) -> None:
        """Leave."""
        self.wire.close()

    def _do_due(self) -> None:
        now = time.monotonic()
        if now >= self.machine.wakeup:
            self.machine.on_tick(now)
        self.flush()

    def _take_in(self, packet: Sequence[Buffer]) -> None:
        try:
            sender, messages = decode_bundle(packet)
        except ProtocolError:
            self.refused += 1
            return
        now = time.monotonic()
        for message in messages:
            self._learn(message)
            if isinstance(message, View) and message.term > self._term:
                self._follow_term(message.term)
            self.machine.on_message(sender, message, now)

    def _follow_term(self, term: int) -> None:
        """Another process coordinates: what is sent to the one before would be lost, though its end may not have
        been noticed here."""
        if self._term:
            self._connected.pop(COORDINATOR, None)
            self._tried_at.pop(COORDINATOR, None)
        self._term = term

    def _learn(self, message: PsMessage) -> None:
        """Where nodes listen, from those who come and from those who say who is there."""
        if isinstance(message, View):
            self._addresses.update(message.addresses)
        elif isinstance(message, Join):
            self._addresses[message.node] = message.address

    def _reach(self, node: int) -> bool:
        """Whether there is a way to a node; one that ended, or leads elsewhere, is made anew."""
        address = self._addresses.get(node)
        if address is None:
            return False
        if self._connected.get(node) == address and node not in self.wire.gone():
            return True
        now = time.monotonic()
        if now - self._tried_at.get(node, 0.0) < _RECONNECT_S and self._connected.get(node) == address:
            return False  # The machine repeats what matters.
        self._tried_at[node] = now
        self._connected[node] = address
        self.wire.connect(node, address)
        return True


def bundles(messages: Iterable[PsMessage]) -> Iterator[list[PsMessage]]:
    """Messages for one node, in order, by the packets that they share.

    One with bulk closes its packet, so that the node can check it while the next is still on its way.
    """
    bundle: list[PsMessage] = []
    for message in messages:
        bundle.append(message)
        if message.frames:
            yield bundle
            bundle = []
    if bundle:
        yield bundle


def packets(sender: int, bundle: Sequence[PsMessage]) -> Iterator[list[Buffer]]:
    """A bundle as one packet, or as several, in order, where its messages together are too much for one."""
    try:
        packet = encode_bundle(sender, bundle)
    except TooLarge:
        if len(bundle) == 1:
            raise
        half = len(bundle) // 2
        yield from packets(sender, bundle[:half])
        yield from packets(sender, bundle[half:])
    else:
        yield packet


def encode_bundle(sender: int, messages: Sequence[PsMessage]) -> list[Buffer]:
    """Messages for one node as one packet."""
    packed = [pack(message) for message in messages]
    rows = [[one.kind, one.fields, len(one.frames)] for one in packed]
    frames: list[Frame] = [frame for one in packed for frame in one.frames]
    return encode(Message("bundle", {"from": sender, "messages": rows}, frames))


def decode_bundle(packet: Sequence[Buffer]) -> tuple[int, list[PsMessage]]:
    """Sender and messages of a packet; `ProtocolError` for anything that is none."""
    bundle = decode(packet)
    match bundle.fields:
        case {"from": int(sender), "messages": list(rows)} if bundle.kind == "bundle":
            pass
        case _:
            raise ProtocolError("A packet is no bundle of messages.")
    messages, at = [], 0
    for row in rows:
        match row:
            case [str(kind), dict(fields), int(count)] if 0 <= count <= len(bundle.frames) - at:
                messages.append(unpack(Message(kind, fields, bundle.frames[at : at + count])))
                at += count
            case _:
                raise ProtocolError("A row of a bundle is not [kind, fields, frames].")
    if at != len(bundle.frames):
        raise ProtocolError("A bundle has frames that belong to no message.")
    return sender, messages
