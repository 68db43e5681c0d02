"""The channels of a host's processes. Nobody who does not read can make the host wait."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Iterator
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.words import FROM_PROCESSES, Garbled, understood
from shoal.errors import PeerLost, ProtocolError
from shoal.launch.messages import Deaf, Said
from shoal.spec.told import Told

MOST_UNSENT = 1000
"""Messages that may wait for a process, beyond what the kernel keeps for it, before it counts as deaf."""


class Links:
    """Hears and says, by the numbers of processes."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._unsent: dict[int, deque[dict[str, Any]]] = {}
        self._deaf: list[int] = []
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell or to do."""
        return self._selector.fileno()

    def open(self, process: int) -> Channel:
        """The other end of a new process's channel, to be handed to it and closed."""
        self._channels[process], theirs = Channel.pair()
        self._unsent[process] = deque()
        self._selector.register(self._channels[process], selectors.EVENT_READ, process)
        return theirs

    def collect(self) -> Iterator[Said | Deaf]:
        """What processes have said since the last call, and who reads nothing; sends what could not be sent."""
        for key, events in self._selector.select(0):
            if events & selectors.EVENT_WRITE:
                self._send(key.data)
            if events & selectors.EVENT_READ:
                yield from self.drain(key.data)
        while self._deaf:
            yield Deaf(self._deaf.pop())

    def drain(self, process: int) -> Iterator[Said]:
        """What one of them has said since."""
        channel = self._channels[process]
        if channel.fileno() not in self._selector.get_map():
            return
        while True:
            try:
                message = channel.poll()
            except PeerLost:
                # Its end is told by whoever reaps it; the socket would only keep waking us.
                self._selector.unregister(channel)
                return
            except ProtocolError as error:
                yield Said(process, Garbled(text=str(error)))
                continue
            if message is None:
                return
            yield Said(process, understood(message, FROM_PROCESSES))

    def say(self, process: int, word: Told) -> None:
        """Say something to a process, if it still lives; later, where it has not read what was said before."""
        unsent = self._unsent[process]
        unsent.append(word.as_message())
        if len(unsent) > MOST_UNSENT:
            unsent.pop()
            self._deaf.append(process)
        self._send(process)

    def close(self) -> None:
        """Hang up on all of them."""
        self._selector.close()
        for channel in self._channels.values():
            channel.close()

    def _send(self, process: int) -> None:
        channel, unsent = self._channels[process], self._unsent[process]
        try:
            while unsent and channel.try_send(unsent[0]):
                unsent.popleft()
        except PeerLost:
            unsent.clear()  # What follows from its end is decided when that is told.
        if channel.fileno() in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(channel, wanted, process)
