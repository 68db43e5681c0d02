"""Ctrl-C and SIGTERM as something a selector can wait for."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM while its block runs, in place of what they would do.

    Only the main thread may say what signals do; in any other this counts nothing.
    """

    def __init__(self) -> None:
        self._count = 0
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._in_charge = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Interrupts:
        if self._in_charge:
            self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            self._before = {signum: signal.signal(signum, self._count_one) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_charge:
            for signum, handler in self._before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._wakeup_before)
        self._wake.close()
        self._woken.close()

    def fileno(self) -> int:
        """Readable after a signal, until it is taken."""
        return self._woken.fileno()

    def take(self) -> int:
        """How many have come since the last call."""
        try:
            while self._woken.recv(64):
                pass
        except BlockingIOError:
            pass
        taken, self._count = self._count, 0
        return taken

    def _count_one(self, *_: object) -> None:
        self._count += 1
