"""The channels of a host's processes."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import Any

from shoal.comm.channel import Channel
from shoal.errors import PeerLost
from shoal.launch.messages import Said


class Links:
    """Hears and says, by the numbers of processes."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell."""
        return self._selector.fileno()

    def open(self, process: int) -> Channel:
        """The other end of a new process's channel, to be handed to it and closed."""
        self._channels[process], theirs = Channel.pair()
        self._selector.register(self._channels[process], selectors.EVENT_READ, process)
        return theirs

    def collect(self) -> Iterator[Said]:
        """What processes have said since the last call."""
        for key, _ in self._selector.select(0):
            yield from self.drain(key.data)

    def drain(self, process: int) -> Iterator[Said]:
        """What one of them has said since."""
        channel = self._channels[process]
        if channel.fileno() not in self._selector.get_map():
            return
        try:
            while (message := channel.poll()) is not None:
                yield Said(process, message)
        except PeerLost:
            # Its end is told by whoever reaps it; the socket would only keep waking us.
            self._selector.unregister(channel)

    def say(self, process: int, message: dict[str, Any]) -> None:
        """Say something to a process, if it still lives."""
        try:
            self._channels[process].send(message)
        except PeerLost:
            pass  # What follows from its end is decided when that is told.

    def close(self) -> None:
        """Hang up on all of them."""
        self._selector.close()
        for channel in self._channels.values():
            channel.close()
