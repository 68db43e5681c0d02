"""Plain lines for logs and pipes: no colours, no cursor, a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from shoal.observe import wording
from shoal.observe.events import Event
from shoal.observe.happenings import Evaluated, Finished, ProgressMade, StepsTaken, Stopped
from shoal.observe.summary import RunSummary


class PlainSink:
    """Writes progress as lines, at most one per `interval_s`, and every other thing that happens at once."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._next_line = clock()
        self._shown_step = 0
        self._summary = RunSummary()

    def handle(self, event: Event) -> None:
        """Write what this event is worth."""
        self._summary.add(event)
        if wording.is_raised(event):
            return
        due = isinstance(event.what, StepsTaken | ProgressMade) and self._clock() >= self._next_line
        if due or (isinstance(event.what, Evaluated) and self._summary.step != self._shown_step):
            self._write_progress()
        if (text := wording.line(event)) is not None:
            self._write(text)
        if isinstance(event.what, Finished | Stopped):
            self._write_table()

    def close(self) -> None:
        """Nothing is held back, so nothing is left to write."""
        self._stream.flush()

    def _write_progress(self) -> None:
        summary = self._summary
        self._shown_step = summary.step
        self._next_line = self._clock() + self._interval_s
        total = f"/{summary.total_steps:,}" if summary.total_steps else ""
        words = [f"step {summary.step:,}{total}"]
        if summary.loss is not None:
            words += [f"epoch {summary.epoch}", f"loss {wording.number(summary.loss)}"]
        if summary.speed.samples_per_s is not None:
            words.append(f"{wording.rate(summary.speed.samples_per_s)} samples/s")
            words.append(f"{wording.duration(summary.seconds_left)} left")
        self._write("  ".join(words))

    def _write_table(self) -> None:
        rows = wording.final_rows(self._summary)
        width = max(len(name) for name, _ in rows)
        self._write("")
        for name, value in rows:
            self._write(f"  {name:<{width}}  {value}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
