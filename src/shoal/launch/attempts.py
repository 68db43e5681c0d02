"""Attempts: a run that a death has ended goes on by itself, from its newest whole checkpoint or from its start.

Each attempt is a supervisor of its own, with new processes in the same run folder. What an attempt did after the
step that the next one begins at is undone, and whoever reads the run's events is told so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.wholeness import check_folder
from shoal.errors import CheckpointError, Interrupted, WorkerFailed
from shoal.launch.chaos import Timetable
from shoal.launch.engines import engine_for
from shoal.launch.failure_log import FailureLog, verdict
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, start_zygote
from shoal.launch.requests import Requests
from shoal.launch.supervisor import Supervisor
from shoal.launch.worlds import servers_of
from shoal.observe import Event, RunFolder
from shoal.observe.checkpoint_names import step_folders
from shoal.observe.happenings import (
    ADVANCES,
    Failed,
    Happening,
    LineSaid,
    Raised,
    Restarted,
    Resumed,
    StepsTaken,
    Warned,
)
from shoal.observe.wording import plural
from shoal.spec import Job

if TYPE_CHECKING:
    from shoal.launch.remote.adoption import Adoption


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """Where an attempt can begin."""

    step: int
    reached_at: float
    """When training was there, in seconds since 1970."""
    path: Path | None
    """The checkpoint of that step; None: the model that the task makes."""


class Attempts:
    """One run from its first to its last attempt."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        on_event: Callable[[Event], None],
        requests: Requests,
        adoption: Adoption | None = None,
    ) -> None:
        """`adoption`: an attempt that another supervisor has begun, with which this one goes on."""
        self._job = job
        self._adoption = adoption
        self._folder = folder
        self._on_event = on_event
        self._requests = requests
        self._began_at = self._attempt_at = time.time()
        self._timetable = Timetable.of(job) if adoption is None else adoption.timetable
        resumed = job.options.get("resume")
        self._begin = Milestone(
            step=int(job.options.get("resume_step", 0)),
            reached_at=self._began_at,
            path=Path(resumed) if resumed else None,
        )
        """Where the present attempt began."""
        self._start = self._begin
        self._is_resumed = resumed is not None
        self._top_step, self._total_steps = self._begin.step, 0
        self._raised: dict[int | None, Raised] = {}
        """By rank, of this attempt: what a worker said about the error that ended it."""
        self._log = FailureLog(job.max_failures)
        self._restarts = 0
        self._restarts_here = 0
        """How often the run went back to the same step."""
        self._known_steps: dict[int | None, int] = {}
        """By rank: up to which step was told by a supervisor in whose place this one goes on."""
        if adoption is not None:
            self._recall(adoption.past.head, adoption.told)

    def _recall(self, head: Mapping[str, Any], told: Sequence[Event]) -> None:
        """What the supervisor before this one has left for this, and told."""
        for event in told:
            match event.what:
                case StepsTaken(steps=[*_, [step, _]], total_steps=total):
                    self._top_step, self._total_steps = step, total
                    self._known_steps[event.rank] = step
        self._began_at, self._attempt_at, self._is_resumed = head["began_at"], head["attempt_at"], False
        self._restarts, self._restarts_here = head["restarts"], head["restarts_here"]
        begun, path = head["start"]
        self._start = Milestone(step=begun, reached_at=self._began_at, path=Path(path) if path else None)

    def _head(self) -> dict[str, Any]:
        """The same, of this one."""
        start = [self._start.step, "" if self._start.path is None else str(self._start.path)]
        return {
            "began_at": self._began_at,
            "attempt_at": self._attempt_at,
            "restarts": self._restarts,
            "restarts_here": self._restarts_here,
            "start": start,
        }

    def run(self, zygote: ZygoteProcess | None = None) -> None:
        """Run the job to its end; raises what ended the last attempt, where that was not the end of its work."""
        job = self._job
        with ExitStack() as at_end:
            at_end.callback(lambda: self._timetable.tell_open(self._tell))
            is_here = not job.cluster.is_remote
            if is_here and zygote is None and ZYGOTE_VARIABLE not in os.environ:
                # One for all attempts: the next ones begin in no time.
                zygote = at_end.enter_context(start_zygote())
            engine = engine_for(
                job.cluster,
                zygote,
                tell=lambda text: self._tell(LineSaid(text=text)),
                wants_end=lambda: self._requests.wants_end,
            )
            while True:
                supervisor = Supervisor(
                    job,
                    self._hear,
                    engine,
                    timetable=self._timetable,
                    requests=self._requests,
                    head=self._head(),
                    adoption=self._adoption,
                )
                self._adoption = None
                try:
                    supervisor.run()
                    return
                except WorkerFailed as failure:
                    if supervisor.machine.is_stopping or not (failure.is_transient and self._job.restarts):
                        raise
                    job = self._next_job(failure)
                    self._known_steps.clear()
                if self._requests.wants_end:
                    raise Interrupted("The run was stopped on request, while it was about to begin again.")

    def _tell(self, what: Happening, rank: int | None = None) -> None:
        self._on_event(Event(what, rank))

    def _hear(self, event: Event) -> None:
        """What an attempt tells; whether it has failed for good is told by whoever started the run."""
        if self._is_resumed and isinstance(event.what, ADVANCES):
            self._is_resumed = False
            self._tell(Resumed(step=self._start.step))
        if isinstance(event.what, StepsTaken) and self._known_steps:
            known = self._known_steps.get(event.rank, 0)
            if not (steps := [one for one in event.what.steps if one[0] > known]):
                return
            event = replace(event, what=replace(event.what, steps=steps))
        match event.what:
            case Failed():
                return
            case StepsTaken(steps=[*_, [step, _]], total_steps=total):
                self._top_step, self._total_steps = step, total
            case Raised():
                self._raised[event.rank] = event.what
        self._on_event(event)

    def _next_job(self, failure: WorkerFailed) -> Job:
        """The job of the next attempt; raises where another one would not help."""
        raised = self._raised.get(failure.global_rank)
        if raised is not None and not raised.final and self._log.is_poisoned(raised):
            raise _final(failure, verdict(raised))
        try:
            begin, samples = self._newest_whole()
        except CheckpointError as error:
            raise _final(
                failure, f"{failure} The run cannot begin again from where it was resumed: {error}"
            ) from None
        self._restarts_here = self._restarts_here + 1 if begin.step == self._begin.step else 1
        if self._restarts_here > self._job.max_failures:
            before = plural(self._restarts_here - 1, "restart")
            why = f"There were {before} after step {begin.step:,} without another checkpoint, and max_failures="
            raise _final(failure, f"{failure} {why}{self._job.max_failures}.")
        self._restarts += 1
        restarted = Restarted(
            reason=str(failure),
            step=begin.step,
            samples=samples,
            undone=max(0, self._top_step - begin.step),
            seconds=max(0.0, time.time() - max(begin.reached_at, self._attempt_at)),
        )
        self._tell(restarted, failure.global_rank)
        self._timetable.begin_again()
        self._begin, self._top_step, self._attempt_at = begin, begin.step, time.time()
        self._raised.clear()
        return self._job_from(begin)

    def _newest_whole(self) -> tuple[Milestone, int]:
        """The newest whole checkpoint of this run, or its start; and how many samples it had trained on."""
        for path in reversed(step_folders(self._folder.checkpoints)):
            try:
                found = read_manifest(path)
                # Older ones may be of a past that was given up when the run was resumed at an earlier step.
                if found.saved_at < self._began_at or self._leaves_nothing(found.step):
                    continue
                check_folder(path)
                reached_at = found.saved_at - found.seconds
                return Milestone(step=found.step, reached_at=reached_at, path=path), found.facts["samples"]
            except CheckpointError as error:
                self._tell(Warned(text=f"{error} It was skipped."))
        start = self._start
        return start, 0 if start.path is None else read_manifest(start.path).facts["samples"]

    def _leaves_nothing(self, step: int) -> bool:
        """Whether servers would have nothing left to do after it; workers by themselves save the model and end."""
        return servers_of(self._job) > 0 and step >= self._total_steps

    def _job_from(self, begin: Milestone) -> Job:
        options = {**self._job.options, "failures": self._restarts, "ran_s": time.time() - self._began_at}
        if begin.path is not None:
            options |= {"resume": str(begin.path), "resume_step": begin.step}
        return replace(self._job, options=options)


def _final(failure: WorkerFailed, message: str) -> WorkerFailed:
    """The same failure, with the sentence that says why no attempt follows."""
    return WorkerFailed(
        message, global_rank=failure.global_rank, details=failure.details, exit_code=failure.exit_code
    )
