"""What scripts print on hosts, on its way to the supervisor's terminal."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from shoal.comm.host_words import ScriptPrinted
from shoal.launch.echo import Echo
from shoal.launch.remote.line import HostLine

_PIECE_BYTES = 1 << 16
_SEND_S = 5.0


class PrintedLines:
    """A pipe into which the echo of a host's processes goes. Where the line to the supervisor is slow it is read
    slowly, so that processes which print much wait, as they would for a slow terminal."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """`selector` wakes whoever is to call `send_to` when there is something."""
        self._selector = selector
        self._ours, theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._theirs: BinaryIO = os.fdopen(theirs, "wb", buffering=0)
        self.echo = Echo(self._theirs, alone=False)
        self.echo.__enter__()
        self._is_awaited = self._is_over = False
        self._await()

    def fileno(self) -> int:
        """Where processes' lines come out."""
        return self._ours

    def send_to(self, line: HostLine) -> None:
        """Send what there is, whenever nothing else is to be sent."""
        if self._is_awaited:
            self._selector.unregister(self)
            self._is_awaited = False
            line.send_behind(self._words())

    def end(self, line: HostLine) -> None:
        """No process prints any more: send the rest."""
        self._is_over = True
        closing = threading.Thread(target=self._close_echo, name="shoal-printed")
        closing.start()
        os.set_blocking(self._ours, True)
        line.send_behind(self._words())
        line.send_all(_SEND_S)
        for _ in self._words():
            pass  # What the supervisor did not take in time: else the echo would wait for room.
        closing.join()
        os.close(self._ours)

    def _words(self) -> Iterator[ScriptPrinted]:
        while data := self._read():
            yield ScriptPrinted(data=data)
        if not self._is_over:
            self._await()

    def _read(self) -> bytes:
        try:
            return os.read(self._ours, _PIECE_BYTES)
        except BlockingIOError:
            return b""

    def _await(self) -> None:
        self._selector.register(self, selectors.EVENT_READ)
        self._is_awaited = True

    def _close_echo(self) -> None:
        self.echo.__exit__()
        self._theirs.close()


class WholeLines:
    """What comes from one host, handed on in whole lines, since others print meanwhile."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._begun: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        """A piece has come; lines that have begun in it wait for the next."""
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            self._show(b"".join([*self._begun, lines, newline]))
            self._begun = []
        self._begun.append(rest)
