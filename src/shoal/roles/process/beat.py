"""A process's sign of life: a thread that says five times a second where it stands."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from shoal.comm.channel import Channel
from shoal.errors import PeerLost
from shoal.observe.happenings import Heartbeat
from shoal.roles.process.pulse import Pulse
from shoal.roles.process.stacks import offer_stacks
from shoal.spec.vocabulary import State

INTERVAL_S = 0.2


class Beat:
    """Sends `beat` while the block runs. A process that no supervisor hears has no purpose any more: it ends.

    `on_message`, where given, receives what the supervisor says; else somebody else reads the channel.
    """

    def __init__(
        self, channel: Channel, pulse: Pulse, on_message: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._channel = channel
        self._pulse = pulse
        self._on_message = on_message
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-beat", daemon=True)

    def __enter__(self) -> Beat:
        offer_stacks(self._channel)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._on_message is None:
            self._thread.join()
        self._pulse.enter(State.ENDING)  # It may take its time over that, and says nothing more.
        try:
            self._send()
        except PeerLost:
            pass

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._send()
                self._pause()
        except PeerLost:
            if not self._over.is_set():
                os.kill(os.getpid(), signal.SIGKILL)

    def _send(self) -> None:
        self._channel.send(Heartbeat(rss=rss_bytes(), **self._pulse.read(INTERVAL_S)).as_message())

    def _pause(self) -> None:
        if self._on_message is None:
            self._over.wait(INTERVAL_S)
        elif (message := self._channel.receive(INTERVAL_S)) is not None:
            self._on_message(message)


def rss_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
