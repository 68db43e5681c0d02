"""What happened to which tensor when, as a file for chrome://tracing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TensorTimeline:
    """Of one process. It writes only between `start` and `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._events: list[dict[str, Any]] = []
        self._open: dict[str, tuple[str, float]] = {}
        self._rows: dict[str, int] = {}

    def start(self, path: str | Path) -> None:
        """From now on, keep what happens for this file."""
        with self._lock:
            self._path, self._events, self._open, self._rows = Path(path), [], {}, {}

    def stop(self) -> None:
        """Write the file."""
        with self._lock:
            if self._path is not None:
                self._path.write_text(json.dumps(self._events), encoding="utf-8")
                self._path = None

    def begin(self, name: str, phase: str) -> None:
        """Something begins for this tensor; what was before it ends."""
        with self._lock:
            if self._path is not None:
                self._end(name)
                self._open[name] = phase, time.monotonic()

    @contextmanager
    def during(self, names: Sequence[str], phase: str) -> Iterator[None]:
        """These tensors are in this phase, which is their last, while the block runs."""
        for name in names:
            self.begin(name, phase)
        yield
        with self._lock:
            if self._path is not None:
                for name in names:
                    self._end(name)

    def _end(self, name: str) -> None:
        if (begun := self._open.pop(name, None)) is None:
            return
        phase, since = begun
        if name not in self._rows:
            self._rows[name] = len(self._rows)
            self._events.append(
                {"name": "process_name", "ph": "M", "pid": self._rows[name], "args": {"name": name}}
            )
        took_us = (time.monotonic() - since) * 1e6
        self._events.append(
            {"name": phase, "ph": "X", "ts": since * 1e6, "dur": took_us, "pid": self._rows[name], "tid": 0}
        )
