"""`Logger`: a record of runs that somebody else keeps, and what it is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run that is logged."""

    name: str
    folder: Path
    """This logger's own, in that of the run: what it must find again when the run is resumed is kept here."""
    settings: Mapping[str, Any]
    """What was asked for: plain values by dotted names, as `cluster.workers`."""


class Scalar(NamedTuple):
    """A number of one step: `train/loss`, `test/accuracy`, or what a callback logs."""

    step: int
    name: str
    value: float
    time: float
    """Seconds since 1970."""


class RunEnding(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # before its time, as it was asked to
    FAILED = "failed"


class Logger:
    """Is told of one run, by one thread: `begin`, then what happens, then `end`. It may be slow, and need not care
    for all of it: each kind overrides what it wants to hear.

    What it raises ends the logger and not the run, which goes on with a warning. `DiskRefused` is told at the
    end of the run, as for its other files.
    """

    def begin(self, run: LoggedRun) -> None:
        """A run begins; or goes on, where an earlier call has left its mark in `run.folder`."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Keep these, in their order."""

    def note(self, name: str, text: str, step: int) -> None:
        """A text; under the name `faults`: what went wrong at this step, and what became of it."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """A PNG file."""

    def undo(self, step: int) -> None:
        """What was told of later steps is void: the run goes on after this one."""

    def model(self, path: Path, digest: str, step: int) -> None:
        """The model that the run has come to."""

    def end(self, ending: RunEnding) -> None:
        """Nothing more will be told."""


def require_installed(module: str, extra: str) -> None:
    """Refuse a logger at once whose package is not there; it is imported only when the run begins."""
    if importlib.util.find_spec(module) is None:
        raise SpecError(f"Logger {extra!r} needs {module}, which is not installed: pip install shoal[{extra}]")
