"""A file that outlives the processes of a run: when which samples were committed, as each worker saw it."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Timeline:
    """Where every worker of a run appends one line per step: the time, and the samples of all committed by then.

    Each line is written at once and as a whole, so that nothing is lost with a worker that is killed. The file
    stays open as long as the process lives.
    """

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, samples: int) -> None:
        """So many samples are committed now."""
        os.write(self._fd, f"{time.time():.6f} {samples}\n".encode())


def read_timeline(path: Path | str) -> list[tuple[float, int]]:
    """By when how many samples were committed, by whoever saw it first."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    marks = sorted((float(when), int(samples)) for when, samples in (line.split() for line in lines))
    progress: list[tuple[float, int]] = []
    for when, samples in marks:
        if not progress or samples > progress[-1][1]:
            progress.append((when, samples))
    return progress
