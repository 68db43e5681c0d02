"""`LoggerSink`: tells a logger what happens in a run, so that the run never waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue

from shoal.errors import ShoalError
from shoal.observe import wording
from shoal.observe.disk import writing
from shoal.observe.events import Event
from shoal.observe.happenings import (
    ADVANCES,
    Evaluated,
    Failed,
    FaultInjected,
    Finished,
    HostAdded,
    HostGone,
    Hung,
    ImageLogged,
    Lost,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    ScalarsLogged,
    Scaled,
    StepsTaken,
    Stopped,
    TextLogged,
    Warned,
)
from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar
from shoal.observe.run_folder import RunFolder
from shoal.observe.summary import UNDOING

FAULTS = "faults"
"""What all that goes wrong is noted under."""
PATIENCE_S = 60.0
"""How long the end of a run waits for a logger."""
MOST_WAITING = 100_000
"""So many events may wait for a logger that is slow."""
_MOST_AT_ONCE = 1000
_MOST_TOLD_AGAIN = 10_000
_NUMBERS = (StepsTaken, Evaluated, ScalarsLogged)
_BY_CALLBACKS = (ScalarsLogged, TextLogged, ImageLogged)
_MARKS = (FaultInjected, Hung, HostGone, HostAdded, Lost, Replaced, Restarted, Scaled, Warned, Failed)
_TOLD = (*_NUMBERS, *_MARKS, *UNDOING, TextLogged, ImageLogged, Saved, Finished, Stopped)


class LoggerSink:
    """Hands a run's events to a logger in a thread of its own, which begins with the first step.

    A logger that fails, or is too slow, is left out with one warning, as any sink is.
    """

    def __init__(
        self, name: str, logger: Logger, run: LoggedRun, folder: RunFolder, *, patience_s: float = PATIENCE_S
    ) -> None:
        self.name = name
        self._logger = logger
        self._run = run
        self._folder = folder
        self._patience_s = patience_s
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        """What the logger has not heard; None: nothing more will come."""
        self._thread: threading.Thread | None = None
        self._is_dropped = False
        self._failure: Exception | None = None
        self._by_callbacks: deque[Event] = deque(maxlen=_MOST_TOLD_AGAIN)
        """What they have logged."""
        self._step = 0
        self._saved: Saved | None = None
        self._ending = RunEnding.STOPPED

    def handle(self, event: Event) -> None:
        """Let this wait for the logger. What it failed at before is raised here, once."""
        if isinstance(self._failure, ShoalError):
            return  # It would end the run; `close` tells.
        if self._failure is not None:
            raise self._failure
        if not isinstance(event.what, _TOLD):
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._is_dropped = True
            raise TimeoutError(f"it is so slow that {MOST_WAITING:,} events wait for it")
        self._waiting.put(event)
        if self._thread is None and isinstance(event.what, ADVANCES):
            self._thread = threading.Thread(target=self._work, name=f"shoal-log-{self.name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let the logger hear the rest, and wait for it; nothing where the run has not really begun."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._is_dropped = True
            raise TimeoutError(f"it has not taken all that it was told within {self._patience_s:g} s")
        if self._failure is not None:
            raise self._failure

    # In the logger's thread.

    def _work(self) -> None:
        try:
            with writing(self._run.folder):
                self._run.folder.mkdir(parents=True, exist_ok=True)
            self._logger.begin(self._run)
            for events in self._batches():
                self._tell(events)
            if not self._is_dropped:
                self._end()
        except Exception as error:
            self._failure = error

    def _batches(self) -> Iterator[list[Event]]:
        """What waits, up to the end. A slow logger gets more at once."""
        is_over = False
        while not is_over and not self._is_dropped:
            batch = [self._waiting.get()]
            with suppress(Empty):
                while len(batch) < _MOST_AT_ONCE:
                    batch.append(self._waiting.get_nowait())
            is_over = batch[-1] is None
            yield [event for event in batch if event is not None]

    def _tell(self, events: list[Event]) -> None:
        scalars: list[Scalar] = []
        for event in events:
            if isinstance(event.what, _BY_CALLBACKS):
                self._by_callbacks.append(event)
            if isinstance(event.what, _NUMBERS):
                scalars += _scalars(event)
                continue
            self._log(scalars)
            scalars = []
            self._tell_one(event)
        self._log(scalars)

    def _log(self, scalars: list[Scalar]) -> None:
        if scalars:
            self._logger.log(scalars)
            self._step = max(self._step, scalars[-1].step)

    def _tell_one(self, event: Event) -> None:
        match event.what:
            case TextLogged(name=name, text=text, step=step):
                self._logger.note(name, text, step)
            case ImageLogged(name=name, path=path, step=step):
                self._logger.picture(name, self._folder.path / path, step)
            case Restarted(step=step) | Resumed(step=step):
                self._logger.undo(step)
                self._step, self._saved = step, None
            case Saved():
                self._saved = event.what
            case Finished():
                self._ending = RunEnding.FINISHED
            case Stopped(reason=reason):
                self._ending = RunEnding.FAILED if reason == wording.FAILED else RunEnding.STOPPED
        if isinstance(event.what, _MARKS) and (line := wording.line(event)) is not None:
            self._logger.note(FAULTS, line, self._step)
        if isinstance(event.what, UNDOING):
            self._tell_again(event.what.step)

    def _tell_again(self, step: int) -> None:
        """What callbacks have logged of steps that were undone: they are called once for each, also where it is
        trained twice."""
        logged = [_cut(event, step) for event in self._by_callbacks]
        self._by_callbacks = deque((kept for kept, _ in logged if kept), maxlen=_MOST_TOLD_AGAIN)
        self._tell([undone for _, undone in logged if undone])

    def _end(self) -> None:
        """What the whole run has come to: its chart, which the report has drawn, and its model."""
        if self._folder.chart.is_file():
            self._logger.picture("loss", self._folder.chart, self._step)
        # The model of a run that failed has another name by now, and is none to take.
        if self._saved is not None and (path := Path(self._saved.path)).is_file():
            self._logger.model(path, self._saved.digest, self._step)
        self._logger.end(self._ending)


def _cut(event: Event, step: int) -> tuple[Event | None, Event | None]:
    """What callbacks have logged of steps up to this one, and of later ones."""
    told = event.what
    if isinstance(told, ScalarsLogged):
        parts = ([one for one in told.scalars if (one[0] > step) == is_later] for is_later in (False, True))
        kept, undone = (replace(event, what=ScalarsLogged(scalars=part)) if part else None for part in parts)
        return kept, undone
    assert isinstance(told, TextLogged | ImageLogged)
    return (None, event) if told.step > step else (event, None)


def _scalars(event: Event) -> list[Scalar]:
    """The numbers of an event; what is not known, or is none, is left out."""
    found: list[tuple[int, str, object]] = []
    match event.what:
        case StepsTaken(steps=steps, parts=parts, lr=lr):
            found += [(step, "train/loss", loss) for step, loss in steps]
            found += [
                (step, f"train/{name}", value) for step, named in parts or () for name, value in named.items()
            ]
            found += [(step, "train/lr", lr) for step, _ in steps[-1:]]
        case Evaluated(step=step, results=results):
            found += [(step, f"test/{name}", value) for name, value in results.items()]
        case ScalarsLogged(scalars=scalars):
            found += [(step, name, value) for step, name, value in scalars]
    return [
        Scalar(step, name, float(value), event.time)
        for step, name, value in sorted(found, key=itemgetter(0))
        if isinstance(value, int | float)
    ]
