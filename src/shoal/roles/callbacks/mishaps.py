"""Faults of a run, as its first worker hears of them: read from the events that its supervisor writes.

A worker is told nothing of what becomes of others. In the run's folder it stands in order, whoever reads it, and
where a reader has come to is one number, which a successor goes on from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import SpecError
from shoal.observe.events import Event
from shoal.observe.happenings import Lost, Restarted
from shoal.observe.wording import member
from shoal.spec.callback import Mishap

LOOK_EVERY_S = 0.25
_BEGINNINGS = tuple(f'{{"kind": "{kind.kind_name}"'.encode() for kind in (Lost, Restarted))
"""How the lines begin that tell of faults: no other is read."""


class MishapReader:
    """Looks now and then, and finds each fault once."""

    def __init__(self, events: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._clock = clock
        self._looked_at = -LOOK_EVERY_S
        self._fd: int | None = None

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        return True

    def after(self, offset: int) -> Iterator[tuple[int, Mishap | None]]:
        """What stands in the events after so many bytes: up to where it was read, and what was found there."""
        text = self._read(offset)
        for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
            offset += len(line)
            if line.startswith(_BEGINNINGS):
                yield offset, _mishap_in(line)
        yield offset, None

    def _read(self, offset: int) -> bytes:
        if self._fd is None:
            try:
                self._fd = os.open(self._events, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        return os.pread(self._fd, max(0, os.fstat(self._fd).st_size - offset), offset)

    def close(self) -> None:
        """Nothing more is looked for."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _mishap_in(line: bytes) -> Mishap | None:
    try:
        told = Event.from_json(line.decode()).what
    except (SpecError, UnicodeDecodeError):
        return None
    match told:
        case Lost():
            return Mishap(kind=told.kind_name, who=member(told), reason=told.reason)
        case Restarted():
            return Mishap(kind=told.kind_name, who="all workers", reason=told.reason)
    return None
