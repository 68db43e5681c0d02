"""A worker's part in the faults that a user asked for: it computes slowly, or raises.

Both happen where a part of a batch is read, which every strategy does, so none of them knows about faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from shoal.comm.words import Misbehave
from shoal.errors import InjectedFault
from shoal.feed.parts import LoadedBatch, Part
from shoal.spec import Job
from shoal.spec.chaos import parse_chaos


class Sabotage:
    """What is wrong with this process.

    The supervisor decides and says so (`hear`); only what is to go wrong in whichever process computes a certain
    part is known here from the start, since nobody could tell in time who that will be.
    """

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        chaos = parse_chaos(job.chaos)
        self._clock = clock
        self._sleep = sleep
        self._awaited = sorted(chaos.steps)
        self._poisoned = {
            (fault.step, slot) for fault in chaos.faults if fault.always for slot in job.conduct.fills[fault.rank]
        }
        self._factor = 1.0
        self._slow_until: float | None = None
        self._raises = False

    @classmethod
    def of(cls, job: Job) -> Sabotage | None:
        """The faults of a job's workers; None where it asks for none."""
        return cls(job) if job.chaos else None

    def reaches_fault(self, step: int) -> bool:
        """Whether the supervisor waits for this step to be done, because something is to happen in the next."""
        before = len(self._awaited)
        self._awaited = [awaited for awaited in self._awaited if awaited > step + 1]
        return len(self._awaited) < before

    def hear(self, word: Misbehave) -> None:
        """The supervisor says what goes wrong from now on."""
        if word.fault == "raise":
            self._raises = True
        else:
            self._factor = word.factor
            self._slow_until = None if word.seconds is None else self._clock() + word.seconds

    def spoil(self, part: Part, step: int) -> Part:
        """The same part of a step, with what goes wrong on the way."""

        def load() -> Iterator[LoadedBatch]:
            self._raise_if_due(part.slot, step)
            begun = self._clock()
            # Whoever takes the batches computes on each before it asks for the next, and for the end.
            yield from part.load()
            self._lag(self._clock() - begun)

        return replace(part, load=load)

    def _raise_if_due(self, slot: int, step: int) -> None:
        if self._raises or (step, slot) in self._poisoned:
            self._raises = False
            raise InjectedFault(f"This fault was asked for: slot {slot} of step {step} raises (chaos).")

    def _lag(self, seconds: float) -> None:
        """Take as much longer for what took so long, but not longer than slowness lasts."""
        lag_s = (self._factor - 1) * seconds
        if self._slow_until is not None:
            left_s = self._slow_until - self._clock()
            if left_s <= 0:
                self._factor, self._slow_until = 1.0, None
            lag_s = min(lag_s, left_s)
        if lag_s > 0:
            self._sleep(lag_s)
