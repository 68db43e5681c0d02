"""Where an agent is called by a supervisor that goes on with its run in the place of another."""

from __future__ import annotations

import selectors

from shoal.comm.host_words import TO_HOSTS, HostClaimed
from shoal.comm.security import RunKey
from shoal.comm.tcp.stream_channel import ChannelDoor, StreamChannel
from shoal.comm.words import understood
from shoal.errors import CommError


class Heirs:
    """A door that opens for those who have the run's key: they have the run folder, of which there is one lock."""

    def __init__(self, address: str, key: RunKey) -> None:
        self._door = ChannelDoor(address, key, encrypt=True)
        self.address = self._door.address
        self._callers: list[StreamChannel] = []
        self._selector = selectors.EpollSelector()
        self._selector.register(self._door, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to do."""
        return self._selector.fileno()

    def collect(self) -> tuple[StreamChannel, HostClaimed] | None:
        """Who claims this host, and how much it knows; None where nobody does. Never waits."""
        for caller in self._door.collect():
            self._callers.append(caller)
            self._selector.register(caller, selectors.EVENT_READ)
        for caller in list(self._callers):
            try:
                if (message := caller.poll()) is None:
                    continue
                word = understood(message, TO_HOSTS)
            except CommError:
                word = None
            self._callers.remove(caller)
            self._selector.unregister(caller)
            if isinstance(word, HostClaimed):
                return caller, word
            caller.close()
        return None

    def close(self) -> None:
        """Let nobody in any more."""
        self._selector.close()
        self._door.close()
        for caller in self._callers:
            caller.close()
