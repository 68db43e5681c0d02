"""The workers' output, live on the terminal: each line under the rank that wrote it."""

from __future__ import annotations

import os
import selectors
import threading
from typing import BinaryIO

_READ_BYTES = 65536
_DRAIN_TIMEOUT_S = 5.0


class Echo:
    """Copies what processes write to one stream, whole lines at a time, while its block runs.

    A process that is alone writes to the stream itself, so that its bars and colours work.
    """

    def __init__(self, stream: BinaryIO, *, alone: bool) -> None:
        self._stream = stream
        self._alone = alone
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, bytes] = {}
        self._wake_out, self._wake_in = os.pipe()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._copy, name="shoal-echo", daemon=True)
        self._ended = False

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Copy what is left. Whoever writes has ended by now, or is a stranger not worth waiting for."""
        self._ended = True
        os.close(self._wake_in)
        self._thread.join(_DRAIN_TIMEOUT_S)
        self._selector.close()
        os.close(self._wake_out)

    def open(self, label: str) -> int:
        """The file that a process named `label` writes to."""
        self._stream.flush()
        if self._alone:
            return os.dup(self._stream.fileno())
        ours, theirs = os.pipe()
        self._pending[ours] = b""
        # Adding to the selector of a thread that waits is what epoll allows.
        self._selector.register(ours, selectors.EVENT_READ, f"[{label}] ".encode())
        return theirs

    def _copy(self) -> None:
        while not self._ended or self._pending:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._take(key.fd, key.data)
                elif self._ended:
                    self._selector.unregister(self._wake_out)

    def _take(self, source: int, prefix: bytes) -> None:
        data = os.read(source, _READ_BYTES)
        *lines, rest = (self._pending[source] + data).split(b"\n")
        if not data and rest:
            lines.append(rest)
        self._write(b"".join(prefix + line + b"\n" for line in lines))
        if data:
            self._pending[source] = rest
            return
        self._selector.unregister(source)
        del self._pending[source]
        os.close(source)

    def _write(self, text: bytes) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            pass  # Nobody reads any more; the scripts need not care.
