"""An engine whose workers are killed at chosen moments."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Sequence

from helpers.observed import ObservedEngine
from shoal.arena.waits import LINE
from shoal.launch.local import LocalHost
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Job, World
from shoal.strategies.base import Setting
from shoal.strategies.data.shared import Marks

GUARD_S = 60.0


def anywhere(kills: int, places: int, seed: int = 11) -> list[tuple[int, bool]]:
    """Hosts of places to be killed: every second one in the middle of a chunk, the others anywhere."""
    chance = random.Random(seed)
    return [(chance.randrange(places), bool(number % 2)) for number in range(kills)]


class Killer(ObservedEngine):
    """Kills the hosts of places in turn, each when the one before has been followed; then stops the run.

    `plan`: the place, and whether to wait until its host is in the middle of a chunk.
    """

    def __init__(self, zygote: ZygoteProcess, plan: Sequence[tuple[int, bool]]) -> None:
        super().__init__(zygote)
        self.killed = 0
        self._plan = plan
        self._random = random.Random(5)
        self._ready = threading.Semaphore(0)
        self._over = threading.Event()

    def open(self, job: Job) -> LocalHost:
        host = super().open(job)
        self._thread = threading.Thread(target=self._run, args=(job,))
        self._thread.start()
        return host

    def on_event(self, event: Event) -> None:
        """All places have hosts (again): the next kill may come."""
        if event.kind in ("world", "replaced"):
            self._ready.release()

    def finish(self) -> None:
        self._over.set()
        self._ready.release()
        self._thread.join()

    def _run(self, job: Job) -> None:
        places = job.cluster.places
        marks = Marks(Setting(world=World(world_size=places), conduct=job.conduct))
        for place, in_chunk in self._plan:
            self._ready.acquire()
            if self._over.is_set():
                return
            if in_chunk:
                self._wait_for_torn_chunk(marks, place)
            else:
                time.sleep(self._random.uniform(0.0, 0.04))
            self._kill(place)
        self._ready.acquire()
        if not self._over.is_set():
            os.kill(os.getpid(), signal.SIGINT)  # enough: the run may end

    def _wait_for_torn_chunk(self, marks: Marks, place: int) -> None:
        with mmap.mmap(self.host.arena_fd, marks.count * LINE, prot=mmap.PROT_READ) as memory:
            give_up = time.monotonic() + 0.2  # a small model has no chunk for every worker
            while not memory[marks.progress[place] * LINE] & 1 and time.monotonic() < give_up:
                time.sleep(0.00005)

    def _kill(self, place: int) -> None:
        victim = next(one for one in self.running("worker") if place in one.places)
        self.signal(victim, signal.SIGKILL)
        self.killed += 1
