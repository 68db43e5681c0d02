"""Processor time of all processes in some network namespaces, as a run goes on.

What bytes cost there is told even on a machine that others use meanwhile, whose clock tells little.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.measurement import Measurement

_LOOK_EVERY_S = 0.2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat, counted from behind the name."""


class ProcessorClock:
    """Looks at those processes now and then, from a thread."""

    def __init__(self, namespaces: Iterable[str]) -> None:
        self._networks = {os.stat(f"/run/netns/{name}").st_ino for name in namespaces}
        self._is_inside: dict[str, bool] = {}
        self._used: dict[str, int] = {}
        self._looks: list[tuple[float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processor-clock", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def of_step(self, run: Measurement) -> float:
        """Seconds of all processes together for a step of this run; 0 where it did not say when it was."""
        if not run.steps or not run.ended_at:
            return 0.0
        return (self._until(run.ended_at) - self._until(run.began_at)) / run.steps

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):  # It has just ended.
                    if self._inside(pid):
                        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
                        self._used[pid] = int(fields[_USER]) + int(fields[_SYSTEM])
            self._looks.append((time.time(), sum(self._used.values()) * _TICK_S))

    def _inside(self, pid: str) -> bool:
        # A process that has just begun may still enter a namespace; one that is there stays there.
        if not self._is_inside.get(pid):
            self._is_inside[pid] = os.stat(f"/proc/{pid}/ns/net").st_ino in self._networks
        return self._is_inside[pid]

    def _until(self, moment: float) -> float:
        """What they had used by then: between two looks, in proportion."""
        before = self._looks[0]
        for after in self._looks:
            if after[0] >= moment:
                width = after[0] - before[0]
                return before[1] + (after[1] - before[1]) * ((moment - before[0]) / width if width else 1.0)
            before = after
        return before[1]
