"""`events.jsonl`: every event of a run but the beats, one line of JSON each.

Of the beats only the most memory each rank held is kept, as one `memory` event at the end.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shoal.errors import ShoalError, SpecError
from shoal.observe.disk import writing
from shoal.observe.events import Event

FILE_NAME = "events.jsonl"


class JsonlSink:
    """Appends events to the run folder's `events.jsonl`, each line as it comes."""

    def __init__(self, run_dir: Path | str) -> None:
        self._folder = Path(run_dir)
        self._peaks: dict[int, int] = {}
        with writing(self._folder):
            self._file = (self._folder / FILE_NAME).open("a", encoding="utf-8", buffering=1)

    def handle(self, event: Event) -> None:
        """Write one line; beats are left out, for they say little an hour later."""
        if event.kind == "beat":
            rank = event.rank or 0
            self._peaks[rank] = max(self._peaks.get(rank, 0), event.values.get("rss", 0))
        elif not self._file.closed:
            self._write(event)

    def close(self) -> None:
        """Write the memory peaks and close the file."""
        if self._file.closed:
            return
        if self._peaks:
            self._write(Event("memory", values={"peak_rss": sorted(self._peaks.items())}))
        self._file.close()

    def _write(self, event: Event) -> None:
        try:
            with writing(self._folder):
                self._file.write(event.to_json() + "\n")
        except ShoalError:
            # The lines that did not fit would fail a second time when the file is closed.
            with suppress(OSError):
                self._file.close()
            raise


def read_events(run_dir: Path | str) -> list[Event]:
    """The events of a run, in order. A last line cut off by a crash is left out."""
    path = Path(run_dir) / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise SpecError(f"Run folder {run_dir}: there is no {FILE_NAME}; name the folder of a run.") from None
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(Event.from_json(line))
        except SpecError as error:
            if number == len(lines):
                break
            raise SpecError(f"{path}, line {number}: {error}") from None
    return events
