"""What a run leaves in its folder, and what there is to say about it at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import DiskRefused, ShoalError
from shoal.observe import Bus, Event, RunFolder, write_report
from shoal.observe.checkpoint_names import folder_name, is_checkpoint, step_folders, step_of
from shoal.observe.happenings import ADVANCES, Audited, Done, Finished, Restarted, StepsTaken, Stopped
from shoal.observe.results import RunResults
from shoal.observe.run_folder import DEFAULT_ROOT
from shoal.observe.wording import FAILED, near
from shoal.spec import Job


class Record:
    """A sink that remembers what the end of a run has to say."""

    def __init__(self) -> None:
        self.total_steps: int | None = None
        self._ends = RunResults()
        self._started = time.monotonic()
        self._marks: list[tuple[float, int]] = []
        """When the first and the latest steps were told of, and how many samples they had trained on."""

    @property
    def results(self) -> dict[str, Any]:
        """What the run came to."""
        return self._ends.values

    def handle(self, event: Event) -> None:
        match event.what:
            case Done():
                self._ends.note(event.rank or 0, event.what)
            case Audited():
                self.results["audit"] = event.values
            case StepsTaken(samples=samples, total_steps=total):
                self.total_steps = total
                self._marks[1:] = [(event.time, samples)]
            case Restarted():
                self._ends.begin_again()

    def close(self) -> None: ...

    def recall(self, events: Sequence[Event]) -> None:
        """What was told by a supervisor in whose place another goes on."""
        for event in events:
            self.handle(event)
        if events:
            self._started -= max(0.0, time.time() - events[0].time)

    def ending(self, reason: str | None) -> Finished | Stopped:
        """The event that ends the run; with a reason, before its time."""
        told: dict[str, Any] = {
            "results": self.results.get("results", {}),
            "seconds": time.monotonic() - self._started,
        }
        if len(self._marks) == 2:
            (begin, before), (end, after) = self._marks
            told["samples_per_s"] = (after - before) / max(end - begin, 1e-9)
        return Finished(**told) if reason is None else Stopped(reason=reason, **told)


class Beginning:
    """A sink that lets a job take the place of the one before it, once its run has really begun.

    What is refused until then, by whomever, leaves a run that is resumed as it was.
    """

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder
        self._earlier = folder.model.stat() if folder.model.is_file() else None
        """The model of the attempt before, which is not what this one is to end with."""
        self._refusal: ShoalError | None = None
        self.is_over = False
        """Whether the folder is this job's now."""

    def handle(self, event: Event) -> None:
        if self.is_over or not isinstance(event.what, ADVANCES):
            return
        try:
            self._folder.write_job(self._job)
            if self._earlier is not None:
                self._folder.demote_model(self._earlier)
            self._folder.result.unlink(missing_ok=True)
            self.is_over = True
        except DiskRefused as refusal:
            self._refusal = refusal  # Tried again at the next step.

    def close(self) -> None:
        if not self.is_over and self._refusal is not None:
            raise self._refusal


def leave_behind(folder: RunFolder, record: Record, ending: Finished | Stopped, bus: Bus) -> str:
    """Write what the end of a run leaves behind, as much as the disk takes; returns what it did not, and why."""
    has_failed = isinstance(ending, Stopped) and ending.reason == FAILED

    def keep_result() -> None:
        if record.results and not has_failed:
            folder.write_result({**record.results, "ended": ending.kind_name})

    missing = []
    report = partial(write_report, folder.path)
    saved = partial(_check_saved, folder, record.results if isinstance(ending, Finished) else None)
    tell = partial(bus.emit, Event(ending))
    # Loggers, which end when the bus is closed, take the report's picture along.
    for keep in (keep_result, folder.drop_partial_model, tell, report, bus.close, saved):
        try:
            keep()
        except (ShoalError, OSError) as error:
            missing.append(str(error))
    return " ".join(dict.fromkeys(missing))


def _check_saved(folder: RunFolder, results: Mapping[str, Any] | None) -> None:
    """A run that has finished, with these results, has saved all that was asked for."""
    if results is not None and not folder.model.is_file():
        raise DiskRefused(f"the model is not in {near(str(folder.path))} any more.")
    due = (results or {}).get("due_checkpoints", [])
    if lacking := [str(step) for step in due if not is_checkpoint(folder.checkpoints / folder_name(step))]:
        raise DiskRefused(
            f"{near(str(folder.checkpoints))} lacks what was due after step {', '.join(lacking)}; the "
            f"warnings in {near(str(folder.report))} say why."
        )


def whereabouts(folder: RunFolder) -> str:
    """Where to find what a run has left that was stopped."""
    how = how_to_go_on(folder)
    if folder.model.is_file():
        return f"The model so far is saved in {near(str(folder.model))}, the report beside it. {how}".strip()
    return f"No model was saved; what happened is in {near(str(folder.path))}. {how}".strip()


def how_to_go_on(folder: RunFolder, total_steps: int | None = None) -> str:
    """The command that goes on with a run that failed; nothing where there is no checkpoint."""
    steps = [step_of(path) for path in step_folders(folder.checkpoints) if is_checkpoint(path)]
    if not steps:
        return ""
    run = folder.name if folder.path.parent == Path(DEFAULT_ROOT).absolute() else near(str(folder.path))
    if steps[-1] == total_steps:
        return f"All steps are taken; the model is also in the last checkpoint: shoal checkpoint export {run} FILE"
    return f"Go on after step {steps[-1]:,} with: shoal train --resume {run}"
