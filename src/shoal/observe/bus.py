"""The bus, which hands the events of a run to everyone who listens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shoal.errors import ShoalError
from shoal.observe.events import Event
from shoal.observe.happenings import Warned


class Sink(Protocol):
    """Someone who reads events: a file, a terminal, a chart."""

    def handle(self, event: Event) -> None:
        """Take one event; quickly, for training waits."""

    def close(self) -> None:
        """Write what is left. Called once."""


class Bus:
    """Hands every event to every sink.

    Watching must not end what is watched: a sink that fails is dropped, the others get one warning. Only a
    `ShoalError` passes through: a sink raises it where going on is pointless, as in a folder that was removed.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Hand `event` to all sinks."""
        for sink in list(self._sinks):
            try:
                sink.handle(event)
            except ShoalError:
                raise
            except Exception as error:
                self._drop(sink, error)

    def close(self) -> None:
        """Close all sinks, the last one first; none is left open because another failed."""
        fatal: ShoalError | None = None
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except ShoalError as error:
                fatal = fatal or error
            except Exception as error:
                self._warn(sink, error)
        if fatal is not None:
            raise fatal

    def _drop(self, sink: Sink, error: Exception) -> None:
        # A warning may itself have dropped this sink already.
        if sink in self._sinks:
            self._sinks.remove(sink)
            self._warn(sink, error)

    def _warn(self, sink: Sink, error: Exception) -> None:
        name = getattr(sink, "name", type(sink).__name__)  # Of loggers there may be many.
        text = f"{name} failed and is left out from here on: {type(error).__name__}: {error}"
        self.emit(Event(Warned(text=text)))
