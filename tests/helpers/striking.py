"""An engine one of whose workers gets a signal at a chosen moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.observed import ObservedEngine
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Job


class Striker(ObservedEngine):
    """Sends one signal to one worker, at the first event that is the moment for it."""

    def __init__(self, zygote: ZygoteProcess, rank: int, signum: int, moment: Callable[[Event], bool]) -> None:
        super().__init__(zygote)
        self.struck = 0
        self._rank, self._signum, self._moment = rank, signum, moment

    def run(self, job: Job, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Run a job here to its end; its results."""

        def listen(event: Event) -> None:
            on_event(event)
            if not self.struck and self._moment(event):
                victim = next(one for one in self.running("worker") if one.global_rank == self._rank)
                self.signal(victim, self._signum)
                self.struck += 1

        return super().run(job, listen)
