"""`csv`: a run as tables, for spreadsheets and pandas. `metrics.csv` has a line for each number of each step."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shoal.observe.disk import mend_last_line, writing
from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar

_METRICS, _NOTES = Scalar._fields, ("step", "name", "text")


class CsvLogger(Logger):
    """Writes `settings.csv`, `metrics.csv` and `notes.csv`."""

    def __init__(self, setting: str = "") -> None:
        """`setting`: a folder; default this logger's own in that of the run."""
        self._setting = setting

    def begin(self, run: LoggedRun) -> None:
        self._folder = Path(self._setting) if self._setting else run.folder
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "settings.csv").open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerows([("name", "value"), ("run", run.name), *run.settings.items()])
            self._metrics = _open_table(self._folder / "metrics.csv", _METRICS)
            self._notes = _open_table(self._folder / "notes.csv", _NOTES)

    def log(self, scalars: Sequence[Scalar]) -> None:
        with writing(self._folder):
            csv.writer(self._metrics, lineterminator="\n").writerows(scalars)
            self._metrics.flush()

    def note(self, name: str, text: str, step: int) -> None:
        with writing(self._folder):
            csv.writer(self._notes, lineterminator="\n").writerow((step, name, text))
            self._notes.flush()

    def picture(self, name: str, path: Path, step: int) -> None:
        self.note(name, str(path), step)

    def undo(self, step: int) -> None:
        path = self._folder / "metrics.csv"
        part = path.with_name(f".{path.name}.part")
        with writing(self._folder):
            self._metrics.close()
            with (
                path.open(newline="", encoding="utf-8") as old,
                part.open("w", newline="", encoding="utf-8") as new,
            ):
                rows = csv.reader(old)
                kept = csv.writer(new, lineterminator="\n")
                kept.writerow(next(rows, _METRICS))
                kept.writerows(row for row in rows if int(row[0]) <= step)
            part.replace(path)
            self._metrics = _open_table(path, _METRICS)

    def model(self, path: Path, digest: str, step: int) -> None:
        self.note("model", str(path), step)
        self.note("digest", digest, step)

    def end(self, ending: RunEnding) -> None:
        with writing(self._folder):
            self._metrics.close()
            self._notes.close()


def _open_table(path: Path, header: Sequence[str]) -> IO[str]:
    """A table to append to; where a crash has torn its last line, that is taken away."""
    path.touch()
    with path.open("r+b") as there:
        mend_last_line(there.fileno())
    file = path.open("a", newline="", encoding="utf-8")
    if path.stat().st_size == 0:
        csv.writer(file, lineterminator="\n").writerow(header)
    return file
