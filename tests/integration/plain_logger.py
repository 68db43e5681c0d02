"""A logger of another package: what it hears, a line each, in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shoal.observe.loggers import LoggedRun, Logger, RunEnding, Scalar


class PlainLogger(Logger):
    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._file: IO[str]

    def begin(self, run: LoggedRun) -> None:
        self._file = (run.folder / "heard.txt").open("a")

    def log(self, scalars: Sequence[Scalar]) -> None:
        if self._setting == "broken":
            raise ConnectionError("no route")
        self._file.writelines(f"{step} {name} {value!r}\n" for step, name, value, _ in scalars)

    def model(self, path: Path, digest: str, step: int) -> None:
        self._file.write(f"{step} {path.name} {digest}\n")

    def end(self, ending: RunEnding) -> None:
        self._file.write(f"{ending} {self._setting}\n")
        self._file.close()
