"""`events.jsonl`: every event of a run but the beats, one line of JSON each.

Of the beats only the most memory each rank held is kept, as one `memory` event at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shoal.errors import DiskRefused, SpecError
from shoal.observe.disk import explain_refusal, mend_last_line, writing
from shoal.observe.events import Event
from shoal.observe.happenings import Finished, Heartbeat, MemoryPeaks, Stopped

FILE_NAME = "events.jsonl"
MOST_WAITING_BYTES = 64 << 20
"""So much may wait for a disk that refuses; what comes then is left out, and `close` says so."""


class JsonlSink:
    """Appends events to the run folder's `events.jsonl`, each line as it comes.

    A disk that refuses does not end the run: lines wait in memory and are written as soon as it takes them again.
    Only `close` raises, where some are still missing.
    """

    def __init__(self, run_dir: Path | str, warn: Callable[[str], None] = lambda text: None) -> None:
        """`warn` is told once, when the disk first refuses."""
        self._path = Path(run_dir) / FILE_NAME
        self._warn = warn
        self._peaks: dict[int, int] = {}
        self._waiting = bytearray()
        self._num_left_out = 0
        self._refusal: OSError | None = None
        """Why the last write failed; None where it did not."""
        with writing(self._path.parent):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd: int | None = os.open(self._path, flags, 0o644)
            mend_last_line(self._fd)

    def handle(self, event: Event) -> None:
        """Write one line; beats are left out, for they say little an hour later."""
        if isinstance(event.what, Heartbeat):
            rank = event.rank or 0
            self._peaks[rank] = max(self._peaks.get(rank, 0), event.what.rss)
        elif self._fd is not None:
            self._write(event)
            if isinstance(event.what, Finished | Stopped):
                self._write_peaks()  # The report is made before this is closed.

    def close(self) -> None:
        """Write the memory peaks and what had to wait, and close the file."""
        if self._fd is None:
            return
        self._write_peaks()
        self._flush(self._fd)
        is_removed = os.fstat(self._fd).st_nlink == 0
        os.close(self._fd)
        self._fd = None
        if self._waiting or self._num_left_out:
            assert self._refusal is not None
            raise DiskRefused(f"{FILE_NAME} lacks the last events: {explain_refusal(self._refusal)}.")
        if is_removed:
            raise DiskRefused(f"{FILE_NAME} was removed while the run wrote it.")

    def _write_peaks(self) -> None:
        if self._peaks:
            peaks = [[rank, rss] for rank, rss in sorted(self._peaks.items())]
            self._write(Event(MemoryPeaks(peak_rss=peaks)))
            self._peaks = {}

    def _write(self, event: Event) -> None:
        line = event.to_json().encode() + b"\n"
        if len(self._waiting) + len(line) > MOST_WAITING_BYTES:
            self._num_left_out += 1
        else:
            self._waiting += line
        assert self._fd is not None
        self._flush(self._fd)

    def _flush(self, fd: int) -> None:
        try:
            while self._waiting:
                # What a full disk takes of a line is no torn line: the rest of it comes first, later.
                del self._waiting[: os.write(fd, self._waiting)]
        except OSError as error:
            is_first, self._refusal = self._refusal is None, error
            if is_first:
                self._warn(f"{FILE_NAME}: {explain_refusal(error)}; training goes on, and events wait in memory")


def read_events(run_dir: Path | str) -> list[Event]:
    """The events of a run, in order. Left out are lines that a crash or a full disk has torn, and kinds that only
    another version of Shoal knows."""
    path = Path(run_dir) / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise SpecError(f"Run folder {run_dir}: there is no {FILE_NAME}; name the folder of a run.") from None
    events = []
    for line in lines:
        try:
            events.append(Event.from_json(line))
        except SpecError:
            continue
    return events
