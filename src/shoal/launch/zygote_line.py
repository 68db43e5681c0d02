"""A host's line to its zygote: it never waits for it, and notices when it does not answer."""

from __future__ import annotations

import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shoal.comm.channel import Channel
from shoal.errors import LaunchError, PeerLost

PULSE_S = 5.0
"""How long nothing may be heard before the zygote is asked whether it is there."""
SILENT_S = 60.0
"""How long it may take to answer. It loads torch before it answers first."""
_LOOK_S = 1.0
"""Time between two looks beyond this was the host's own, and is not the zygote's silence."""


class ZygoteLine:
    """Requests to a zygote and what it says. Several hosts may have lines to one zygote."""

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._unsent: deque[tuple[dict[str, Any], Sequence[int], Callable[[], None]]] = deque()
        self._selector = selectors.EpollSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._looked_at = clock()
        self._silent_s = 0.0
        self._is_asked = False

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell or to do."""
        return self._selector.fileno()

    def send(
        self, request: dict[str, Any], fds: Sequence[int] = (), then: Callable[[], None] = lambda: None
    ) -> None:
        """Send a request with copies of `fds`, as soon as there is room; `then` is called once it has gone."""
        self._unsent.append((request, fds, then))
        self._send()

    def collect(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """What it has said since the last call, with file descriptors. PeerLost where it has hung up, LaunchError
        where it has said nothing for too long."""
        self._send()
        while (received := self._channel.poll_with_fds()) is not None:
            self._silent_s, self._is_asked = 0.0, False
            if received[0]["kind"] != "pong":
                yield received
        self._feel_pulse()

    def hang_up(self, timeout_s: float) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Say that nothing more is wanted; its last words, until it hangs up, too."""
        self._channel.finish()
        # Whoever has been silent for so long is not waited for once more.
        deadline = self._clock() + (timeout_s if self._silent_s < SILENT_S else 0.0)
        try:
            while (left_s := deadline - self._clock()) > 0:
                select.select([self._channel], [], [], left_s)
                while (received := self._channel.poll_with_fds()) is not None:
                    if received[0]["kind"] != "pong":
                        yield received
        except PeerLost:
            pass

    def close(self) -> None:
        """Close the connection; what has not gone never will."""
        self._selector.close()
        self._channel.close()
        for _, _, then in self._unsent:
            then()

    def _send(self) -> None:
        while self._unsent:
            request, fds, then = self._unsent[0]
            if not self._channel.try_send(request, fds):
                break
            self._unsent.popleft()
            then()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._channel, wanted)

    def _feel_pulse(self) -> None:
        now = self._clock()
        self._silent_s += min(now - self._looked_at, _LOOK_S)
        self._looked_at = now
        if self._silent_s >= SILENT_S:
            raise LaunchError(
                f"The zygote, from which workers are forked, has not answered for {SILENT_S:.0f} s: it is stopped "
                "or hangs, and without it nobody is started and no end is noticed; start the run again."
            )
        if self._silent_s >= PULSE_S and not self._is_asked:
            self._is_asked = True
            self.send({"kind": "ping"})
