"""What a process prints, on a disk that may refuse it."""

from __future__ import annotations

import io
from typing import Any, TextIO


class LogFile(io.FileIO):
    """A log that loses lines where the disk is full or fails: a `print` of the user's must not end a worker.

    Once the disk takes something again, a line says that some are missing.
    """

    _num_lost = 0
    _why: str | None = None

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._num_lost:
                super().write(f"[{self._num_lost} bytes could not be written here: {self._why}]\n".encode())
                self._num_lost = 0
            return super().write(data) or 0
        except OSError as error:
            self._num_lost += size
            self._why = error.strerror
            return size


def open_log(fd: int) -> TextIO:
    """A stream that writes every line at once to this descriptor, which stays open without it."""
    raw = io.BufferedWriter(LogFile(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
