"""What callbacks were told of a job so far, and what they asked for: a page of memory that outlives its writer.

Every process of the run maps the same file. The first worker writes, the others read what was asked for, and
whoever is first after it goes on where it was: counters stay when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from enum import IntEnum, auto
from pathlib import Path

from shoal.observe.disk import writing

MOST_ASKED = 64
"""So many evaluations a run makes besides those that its task plans."""
_BYTES = mmap.PAGESIZE
_FIRST_ASKED = 32
"""Where the steps begin after which one was asked for."""


class Mark(IntEnum):
    """What is counted, by where it stands."""

    STARTED = 0
    STEP = auto()
    """The last one that was told; likewise of what follows."""
    EVALUATION = auto()
    CHECKPOINT = auto()
    BEST = auto()
    FAULT = auto()
    """How many bytes of the run's events were searched for faults."""
    ENDED = auto()
    INSIDE = auto()
    """Whether a call is going on. Who finds this set when it takes over knows that one was cut off."""
    WRITTEN = auto()
    """The step of the newest checkpoint, told or not."""
    STOP = auto()
    """The run is to end with this step; 0: not before its time. Likewise of what follows."""
    SAVE = auto()
    ASKED = auto()
    """How many evaluations were asked for."""
    WANTED = auto()
    """Whether a callback wants one, and it is not yet said after which step."""


class ToldMarks:
    """The counters of one job; each is written in one piece."""

    def __init__(self, memory: mmap.mmap, original: ToldMarks | None = None) -> None:
        """`original`: gets all that is written here, too."""
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._original = original

    @classmethod
    def open(cls, path: Path) -> ToldMarks:
        """Those in a file, which is made where it is not there; several processes may do so at once."""
        with writing(path.parent):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, _BYTES)  # a full disk must refuse now, not when a page is written
                return cls(mmap.mmap(fd, _BYTES))
            finally:
                os.close(fd)

    @classmethod
    def open_copy(cls, path: Path, of: Path) -> ToldMarks:
        """Those of one host of several, in a file of its own, which begins as the other is. What the first worker
        writes goes there as well; other hosts are told the page with every step."""
        original = cls.open(of)
        with writing(path.parent):
            fd, made = tempfile.mkstemp(dir=path.parent)
            with open(fd, "wb") as file:
                file.write(original.page)
                file.truncate(_BYTES)
            with suppress(FileExistsError):  # Another process of this host was quicker.
                os.link(made, path)
            os.unlink(made)
        return cls(cls.open(path)._memory, original)

    @property
    def page(self) -> memoryview:
        """All of it that is ever written."""
        return memoryview(self._memory)[: 8 * (_FIRST_ASKED + MOST_ASKED)]

    @classmethod
    def private(cls) -> ToldMarks:
        """Those of a process that has no successor."""
        return cls(mmap.mmap(-1, _BYTES))

    def __getitem__(self, mark: Mark) -> int:
        return self._words[mark]

    def __setitem__(self, mark: Mark, value: int) -> None:
        self._set(mark, value)

    def raise_to(self, mark: Mark, value: int) -> None:
        """Let it be at least so much."""
        self._set(mark, max(self._words[mark], value))

    def _set(self, at: int, value: int) -> None:
        self._words[at] = value
        if self._original is not None:
            self._original._set(at, value)

    @property
    def asked(self) -> list[int]:
        """After which steps an evaluation was asked for, in their order."""
        return self._words[_FIRST_ASKED : _FIRST_ASKED + self._words[Mark.ASKED]].tolist()

    def ask_evaluation(self, step: int) -> bool:
        """Let there be one after this step; False where there were too many already."""
        count = self._words[Mark.ASKED]
        if count == MOST_ASKED:
            return False
        if not count or self._words[_FIRST_ASKED + count - 1] < step:
            self._set(_FIRST_ASKED + count, step)
            self._set(Mark.ASKED, count + 1)
        return True

    def rewind(self, step: int, events_bytes: int) -> None:
        """The user goes on after this step, with so much told of the run: what came later is void."""
        for mark in (Mark.STEP, Mark.EVALUATION, Mark.CHECKPOINT, Mark.BEST, Mark.WRITTEN):
            self[mark] = min(self[mark], step)
        for mark in (Mark.STARTED, Mark.ENDED, Mark.INSIDE, Mark.STOP, Mark.SAVE, Mark.WANTED):
            self[mark] = 0
        self[Mark.FAULT] = events_bytes
        self[Mark.ASKED] = sum(asked <= step for asked in self.asked)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._words.release()
        self._memory.close()
        if self._original is not None:
            self._original.close()


def rewind_told(path: Path, events: Path, step: int) -> None:
    """Before a run goes on that the user resumes: let callbacks hear of the steps after this one again."""
    if path.is_file():
        marks = ToldMarks.open(path)
        marks.rewind(step, events.stat().st_size if events.is_file() else 0)
        marks.close()
