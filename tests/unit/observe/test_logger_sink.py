"""A logger hears all that happens, in order, and the run never waits for it nor fails with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.logged import sink_of
from shoal.errors import DiskRefused
from shoal.observe import Bus, Event, RunFolder
from shoal.observe.happenings import (
    Finished,
    Restarted,
    Saved,
    ScalarsLogged,
    StateEntered,
    StepsTaken,
    Stopped,
    TextLogged,
    Warned,
)
from shoal.observe.loggers import LoggedRun, Logger, LoggerSink, RunEnding, Scalar, sink
from shoal.spec.vocabulary import State

GUARD_S = 30.0


class Listener(Logger):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def begin(self, run: LoggedRun) -> None:
        self.heard.append(("begin", run.name))

    def log(self, scalars: Sequence[Scalar]) -> None:
        self.heard += [("log", one.step, one.name) for one in scalars]

    def undo(self, step: int) -> None:
        self.heard.append(("undo", step))

    def note(self, name: str, text: str, step: int) -> None:
        self.heard.append(("note", name, step))

    def model(self, path: Path, digest: str, step: int) -> None:
        self.heard.append(("model", digest, step))

    def end(self, ending: RunEnding) -> None:
        self.heard.append(("end", ending))


class Stuck(Logger):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def begin(self, run: LoggedRun) -> None:
        self.may_go.wait(GUARD_S)


class Broken(Logger):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def log(self, scalars: Sequence[Scalar]) -> None:
        raise self._error


class Warnings:
    """A sink that remembers what was warned of."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def handle(self, event: Event) -> None:
        if isinstance(event.what, Warned):
            self.texts.append(event.what.text)

    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "mine").mkdir()
    return RunFolder(tmp_path / "mine")


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    logger = Stuck()
    yield logger
    logger.may_go.set()


def steps(*numbers: int) -> Event:
    return Event(StepsTaken(steps=[[number, 0.5] for number in numbers], lr=None), 0)


def impatient(logger: Logger, folder: RunFolder) -> LoggerSink:
    run = LoggedRun(name=folder.name, folder=folder.logged / "one", settings={})
    return LoggerSink("one", logger, run, folder, patience_s=0.01)


def test_what_callbacks_have_logged_of_undone_steps_is_told_again(folder: RunFolder) -> None:
    """They are called once for each step, also where it is trained twice."""
    logger = Listener()
    told = sink_of("one", logger, folder)
    for event in (
        steps(1, 2),
        Event(ScalarsLogged(scalars=[[step, "mine", float(step)] for step in (1, 2)])),
        *(Event(TextLogged(name="note", text="hello", step=step)) for step in (1, 2)),
        Event(Restarted(reason="a kill", step=1, samples=1, undone=1, seconds=0.1)),
        steps(2),
        Event(Finished()),
    ):
        told.handle(event)
    told.close()
    assert logger.heard[logger.heard.index(("undo", 1)) + 1 : -1] == [
        ("note", "faults", 1),
        ("log", 2, "mine"),
        ("note", "note", 2),
        ("log", 2, "train/loss"),
    ]


def test_all_is_told_in_order(folder: RunFolder) -> None:
    logger = Listener()
    folder.model.write_bytes(b"weights")
    told = sink_of("one", logger, folder)
    for event in (
        steps(1, 2, 3),
        Event(Restarted(reason="a kill", step=1, samples=1, undone=2, seconds=0.1)),
        steps(2),
        Event(Saved(path=str(folder.model), digest="d")),
        Event(Finished()),
    ):
        told.handle(event)
    told.close()
    assert logger.heard == [
        ("begin", "mine"),
        *(("log", step, "train/loss") for step in (1, 2, 3)),
        ("undo", 1),
        ("note", "faults", 1),
        ("log", 2, "train/loss"),
        ("model", "d", 2),
        ("end", RunEnding.FINISHED),
    ]


def test_a_run_that_takes_no_step_is_not_logged(folder: RunFolder) -> None:
    logger = Listener()
    told = sink_of("one", logger, folder)
    for event in (Event(StateEntered(state=State.READY), 0), Event(Stopped(reason="failed"))):
        told.handle(event)
    told.close()
    assert logger.heard == [] and not folder.logged.exists()


@pytest.mark.parametrize(
    ("ended", "ending"),
    [
        (Finished(), RunEnding.FINISHED),
        (Stopped(reason="interrupted"), RunEnding.STOPPED),
        (Stopped(reason="failed"), RunEnding.FAILED),
    ],
)
def test_how_it_ended(folder: RunFolder, ended: Finished | Stopped, ending: RunEnding) -> None:
    logger = Listener()
    told = sink_of("one", logger, folder)
    told.handle(steps(1))
    told.handle(Event(Saved(path=str(folder.model), digest="d")))  # The file has another name by now.
    told.handle(Event(ended))
    told.close()
    assert logger.heard[-1] == ("end", ending) and "model" not in [what[0] for what in logger.heard]


def test_one_that_fails_is_left_out_with_one_warning(folder: RunFolder) -> None:
    warnings, other = Warnings(), Listener()
    bus = Bus(
        [warnings, sink_of("one", Broken(ConnectionError("no route")), folder), sink_of("two", other, folder)]
    )
    deadline, number = time.monotonic() + GUARD_S, 0
    while not warnings.texts and time.monotonic() < deadline:
        number += 1
        bus.emit(steps(number))
    bus.emit(Event(Finished()))
    bus.close()
    assert warnings.texts == ["one failed and is left out from here on: ConnectionError: no route"]
    assert ("log", number, "train/loss") in other.heard and other.heard[-1] == ("end", RunEnding.FINISHED)


def test_what_the_disk_refuses_is_told_at_the_end(folder: RunFolder) -> None:
    warnings = Warnings()
    bus = Bus([warnings, sink_of("one", Broken(DiskRefused("the disk is full")), folder)])
    bus.emit(steps(1))
    bus.emit(steps(2))
    with pytest.raises(DiskRefused, match="the disk is full"):
        bus.close()
    assert warnings.texts == []


def test_nobody_waits_for_one_that_is_stuck(folder: RunFolder, stuck: Stuck) -> None:
    warnings = Warnings()
    bus = Bus([warnings, impatient(stuck, folder)])
    for number in range(1, 100):
        bus.emit(steps(number))
    bus.close()
    (text,) = warnings.texts
    assert text.endswith("TimeoutError: it has not taken all that it was told within 0.01 s")


def test_one_that_falls_too_far_behind_is_left_out(
    folder: RunFolder, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "MOST_WAITING", 3)
    warnings = Warnings()
    bus = Bus([warnings, impatient(stuck, folder)])
    for number in range(1, 10):
        bus.emit(steps(number))
    bus.close()
    (text,) = warnings.texts
    assert text.endswith("TimeoutError: it is so slow that 3 events wait for it")
