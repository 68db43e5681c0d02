"""The line between a supervisor and the agent of a host: words go as soon as there is room, and nobody waits."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from shoal.comm.tcp.stream_channel import StreamChannel
from shoal.comm.words import understood
from shoal.errors import CommError, PeerLost
from shoal.spec.told import Told


class HostLine:
    """One end of it. A line that has ended says so once all that came over it was collected."""

    def __init__(self, channel: StreamChannel, kinds: Mapping[str, type[Told]]) -> None:
        """`kinds`: what the other end may say."""
        self.ending = ""
        """Why it has ended; empty while it holds."""
        self._channel = channel
        self._kinds = kinds
        self._unsent: deque[dict[str, Any]] = deque()
        self._bulk: deque[Iterator[Told]] = deque()
        self._heard_at = time.monotonic()
        self._selector = selectors.EpollSelector()
        self._selector.register(channel, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell or to do."""
        return self._selector.fileno()

    @property
    def silent_s(self) -> float:
        """Seconds since the other end was heard."""
        return time.monotonic() - self._heard_at

    @property
    def num_unsent(self) -> int:
        """Words for which there was no room yet."""
        return len(self._unsent)

    def send(self, word: Told) -> None:
        """Send, as soon as there is room; what cannot be sent any more is of no use to anybody."""
        self._unsent.append(word.as_message())
        self._flush()

    def send_behind(self, words: Iterable[Told]) -> None:
        """Send these, one after the other, whenever nothing else is to be sent."""
        self._bulk.append(iter(words))
        self._flush()

    @property
    def has_bulk(self) -> bool:
        """Whether some of what was to be sent behind all else has not gone."""
        return bool(self._bulk)

    def collect(self) -> Iterator[Told]:
        """What the other end has said since the last call. Never waits."""
        self._flush()
        try:
            while (message := self._channel.poll()) is not None:
                self._heard_at = time.monotonic()
                yield understood(message, self._kinds)
        except CommError as error:
            self.ending = self.ending or str(error)

    def wait(self, seconds: float) -> None:
        """Until `collect` has something to tell or to do, so long at most."""
        self._selector.select(max(0.0, seconds))

    def send_all(self, seconds: float) -> None:
        """Until all has gone that was to be sent, so long at most. What is heard is passed over, but taken in:
        what lies unread when a connection is closed takes what was sent last with it."""
        deadline = time.monotonic() + seconds
        while not self.ending and time.monotonic() < deadline:
            for _ in self.collect():
                pass
            if not (self._unsent or self._bulk or self._channel.has_unsent):
                return
            self.wait(deadline - time.monotonic())

    def close(self) -> None:
        """Hang up, with what can be sent at once."""
        self._flush()
        self._selector.close()
        self._channel.close()

    def _flush(self) -> None:
        with suppress(PeerLost):  # `collect` tells of it, after its last words.
            self._channel.flush()
            while (self._unsent or self._pull()) and self._channel.try_send(self._unsent[0]):
                self._unsent.popleft()
            waits = bool(self._unsent) or self._channel.has_unsent
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            if self._selector.get_key(self._channel).events != wanted:
                self._selector.modify(self._channel, wanted)

    def _pull(self) -> bool:
        """Whether there was something to be sent behind all else, which is the next then."""
        while self._bulk:
            if (word := next(self._bulk[0], None)) is not None:
                self._unsent.append(word.as_message())
                return True
            self._bulk.popleft()
        return False
