"""What comes in while workers compute: lines of standard input, or what a program yields; it need not end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any

from shoal.comm.desk_words import LINES, VALUES

LINGER_S = 0.05
"""A batch that is not full waits so long for one more record: rows must not wait for an input that pauses."""
_MOST_WAITING = 256
"""Records that are read before a batch takes them."""
_READ_BYTES = 1 << 16
_END = object()


@dataclass(frozen=True)
class Source:
    """Where records come from, and how a batch of them travels."""

    records: Iterable[Any]
    form: str
    encode: Callable[[Sequence[Any]], list[Any]]
    """A batch as buffers."""


def lines_from(fd: int) -> Source:
    """The lines that come through a descriptor; empty ones are left out."""
    return Source(_read_lines(fd), LINES, lambda lines: ["\n".join(lines).encode("utf-8")])


def values_from(values: Iterable[Any]) -> Source:
    """Tensors, arrays, numbers and texts, and tuples, lists and dicts of them."""
    return Source(values, VALUES, _encode_values)


def _read_lines(fd: int) -> Iterator[str]:
    rest = b""
    while read := os.read(fd, _READ_BYTES):
        *lines, rest = (rest + read).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines if line.strip())
    if rest.strip():
        yield rest.decode("utf-8", "replace")


def _encode_values(values: Sequence[Any]) -> list[Any]:
    # Whoever has such values has imported torch; lines need none of it.
    from shoal.comm.codec import Frame, Message, encode
    from shoal.feed.sample_codec import pack

    frames: list[Frame] = []
    records = [pack(value, frames, "predict: a value of the input") for value in values]
    return encode(Message("records", {"records": records}, frames))


@dataclass(frozen=True)
class RecordBatch:
    """Records that are computed together."""

    records: Sequence[Any]
    start: int
    """Records before these."""


class Inflow:
    """Cuts what comes into batches, as it comes; each is kept until its rows are there. At most a few are."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.error: BaseException | None = None
        """What the source raised."""
        self._queue: Queue[Any] = Queue(_MOST_WAITING)
        self._changed = threading.Condition()
        self._kept: dict[int, RecordBatch] = {}
        self._num_cut = self._num_records = 0
        self._is_cutting = self._is_over = self._is_closed = False
        # Nobody can end a thread that waits for a terminal: it ends with this process.
        self._thread = threading.Thread(target=self._read, name="shoal-inflow", daemon=True)
        self._thread.start()

    def batch(self, number: int, most: int, *, waits: bool) -> RecordBatch | None:
        """A batch of at most so many records; None where there is none, nor will be.

        Where nobody waits it may be empty. Who asks again gets the same, until its rows are there.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: number < self._num_cut or self._is_over or not self._is_cutting)
                if number < self._num_cut:
                    return self._kept.get(number, RecordBatch((), 0))
                if self._is_over:
                    return None
                self._is_cutting = True
            # Without the lock: who asks for a batch that is there need not wait for one that is not.
            records, is_last = self._collect(most, waits=waits)
            with self._changed:
                self._keep(records, is_last=is_last)
                self._is_cutting = False
                self._changed.notify_all()

    def forget(self, below: int) -> None:
        """The rows of all batches below this one are there."""
        with self._changed:
            self._kept = {number: batch for number, batch in self._kept.items() if number >= below}

    def close(self) -> None:
        """Let nobody wait for more."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        with suppress(Full):
            self._queue.put_nowait(_END)

    def _collect(self, most: int, *, waits: bool) -> tuple[list[Any], bool]:
        """What has come, at most so many records, and whether that is all."""
        records: list[Any] = []
        timeout_s = None if waits else LINGER_S
        while len(records) < most:
            try:
                record = self._queue.get(timeout=timeout_s)
            except Empty:
                break
            if record is _END:
                return records, True
            records.append(record)
            timeout_s = LINGER_S
        return records, False

    def _keep(self, records: list[Any], *, is_last: bool) -> None:
        self._is_over = is_last
        if records or not is_last:
            self._kept[self._num_cut] = RecordBatch(records, self._num_records)
            self._num_cut += 1
            self._num_records += len(records)

    def _read(self) -> None:
        try:
            for record in self.source.records:
                self._queue.put(record)
                if self._is_closed:
                    return
        except BaseException as error:
            self.error = error
        self._queue.put(_END)
