"""The loop of a server: requests come in from an authenticated wire, and answers go to who asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from shoal.comm.codec import Message, TooLarge, decode, encode
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import ProtocolError
from shoal.ps.plain.clientele import Caller, Clientele
from shoal.ps.plain.messages import Asked, DeskAnswer, WishOutcome, read_request, write_answer

LOOK_EVERY_S = 0.1


class RequestLoop(ABC, Generic[Asked]):
    """One server's, for one thread."""

    def __init__(
        self, address: str, key: RunKey, kind: type[Asked], *, most_clients: int, first_client: int = 0
    ) -> None:
        """`kind`: what clients send here. `first_client`: lower numbers of peers are the server's own affair."""
        self.wire = ZmqWire(address, key=key)
        self.clientele = Clientele(most_clients, first_peer=first_client)
        self.refused = 0
        """Packets of those who have the key that were no requests; nothing was done for them."""
        self._kind, self._first_client = kind, first_client

    @abstractmethod
    def on_request(self, request: Asked, caller: Caller) -> None:
        """Do it, and answer it now or later."""

    def on_message(self, message: Message) -> None:
        """Take in what has come; `ProtocolError` where it is nothing for this server."""
        request, reply_to = read_request(self._kind, message)
        self.on_request(request, self.clientele.meet(request.client, reply_to))

    def take_in(self, wait_s: float = LOOK_EVERY_S) -> None:
        """The next message, if one comes soon."""
        packet = self.wire.poll(wait_s)
        for peer in self.wire.gone():
            if peer >= self._first_client:
                self.wire.disconnect(peer)
                self.clientele.left(peer)
        if packet is None:
            return
        try:
            self.on_message(decode(packet))
        except ProtocolError:
            self.refused += 1  # damaged on the way, or nothing of ours: it is asked for again

    def answer(self, caller: Caller, answer: DeskAnswer) -> None:
        """Tell a client."""
        try:
            packet = encode(write_answer(answer))
        except TooLarge as error:  # Nobody's question may end the service of all.
            refusal = DeskAnswer(sequence=answer.sequence, outcome=WishOutcome.REFUSED, reason=str(error))
            packet = encode(write_answer(refusal))
        if caller.peer not in self.wire.peers:
            self.wire.connect(caller.peer, caller.address)
        self.wire.transmit(caller.peer, packet)
