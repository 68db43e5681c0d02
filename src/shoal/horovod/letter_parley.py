"""Rounds of processes on several hosts, who have no memory in common: each sends what it says to all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.comm.codec import Message
from shoal.comm.transport import Transport
from shoal.errors import CommTimeout, PeerLost

_SAID, _LEFT = "hvd.said", "hvd.left"
_LOOK_EVERY_S = 0.05


class LetterParley:
    """Over a transport of their own: who waits elsewhere reads it, too, to learn who has left."""

    def __init__(self, transport: Transport, ranks: Sequence[int], on_idle: Callable[[], None]) -> None:
        """`on_idle` is called now and then while this waits, and raises to give up."""
        self._transport, self._ranks, self._on_idle = transport, tuple(ranks), on_idle
        self._others = [rank for rank in self._ranks if rank != transport.rank]
        self._number = 0
        self._said: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """By round and rank, of this round and the next."""
        self._left: set[int] = set()
        self._aborted: set[int] = set()

    def meet(self, text: str) -> list[str]:
        self._said.pop(self._number, None)
        self._number += 1
        said = self._said[self._number]
        said[self._transport.rank] = text
        self._tell_all(Message(_SAID, {"number": self._number}, [text.encode()]))
        while self.missing():
            if not self._take(_LOOK_EVERY_S):
                self._on_idle()
        return [said[rank] for rank in self._ranks]

    def leave(self, *, is_aborted: bool) -> None:
        self._tell_all(Message(_LEFT, {"is_aborted": is_aborted}))
        self._transport.close()

    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._ranks if rank not in self._said[self._number])

    def gone(self) -> tuple[int, ...]:
        while self._take(0.0):
            pass
        lost = self._aborted | (self._left & {*self.missing()})
        return tuple(rank for rank in self._ranks if rank in lost)

    def _tell_all(self, message: Message) -> None:
        for rank in self._others:
            with suppress(PeerLost, CommTimeout):  # `gone` tells of it, or the wait for its answer does
                self._transport.send(rank, message)

    def _take(self, timeout_s: float) -> bool:
        """Whether something has come."""
        try:
            sender, message = self._transport.receive(timeout_s)
        except PeerLost as loss:
            if loss.peer is None:  # nobody is left, which each of them has said
                return False
            self._aborted.add(int(loss.peer))
            return True
        except CommTimeout:
            return False
        if message.kind == _LEFT:
            (self._aborted if message.fields["is_aborted"] else self._left).add(sender)
        else:
            self._said[message.fields["number"]][sender] = bytes(message.frames[0]).decode()
        return True
