"""A task's callbacks in a process of its run: with marks that all of its processes share."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import TaskError
from shoal.observe.run_folder import RunFolder
from shoal.observe.told_marks import ToldMarks
from shoal.observe.unsent import Unsent
from shoal.roles.callbacks.telling import Callbacks, Outlet
from shoal.roles.process.joining import Fellows
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.training import Training
from shoal.spec import Job
from shoal.spec.callback import Wish
from shoal.spec.vocabulary import State


def callbacks_of(job: Job, training: Training, reporter: Reporter) -> Callbacks | None:
    """Those of a run with a folder, where successors find what was told; None where there are none."""
    if not training.task.callbacks or not job.run_dir:
        return None
    folder, world = RunFolder(Path(job.run_dir)), training.world
    is_spread = world.is_spread and training.conduct.is_lockstep
    if is_spread and not training.conduct.tells_hosts:
        raise TaskError(
            f"Task: callbacks= may ask all workers for something at one step, which those of on={job.cluster.on} "
            f"are not told by strategy={job.strategy}; use data, train on one host, or leave them out."
        )
    told = folder.told
    marks = (
        ToldMarks.open_copy(Path(world.sockets) / "callbacks.marks", told) if is_spread else ToldMarks.open(told)
    )
    impossible = _impossible(training)
    if training.checkpoints is None or not training.checkpoints.is_on:
        impossible[Wish.SAVE] = "the run keeps no checkpoints; say how many, as with --checkpoint auto,keep=3"
    unsent = reporter.unsent = Unsent(folder.unsent)
    return Callbacks(
        training.task.callbacks,
        marks,
        training.schedule,
        Outlet(
            say=reporter.line,
            warn=reporter.warn,
            log=reporter.log,
            unsent=unsent.take,
            at_work=lambda: reporter.pulse.interlude(State.SCRIPT),
        ),
        is_first=lambda: training.world.is_first,
        in_lockstep=training.conduct.is_lockstep,
        start_step=training.replica.start.step,
        folder=folder,
        impossible=impossible,
    )


def script_callbacks(training: Training, fellows: Fellows, *, has_servers: bool) -> Callbacks | None:
    """Those of a Trainer, which has no folder; its processes have one for their sockets. All call this."""
    if not training.task.callbacks:
        return None
    path = Path(training.world.sockets) / "callbacks.marks"
    if not has_servers:  # else nobody makes a second Trainer, and who follows a dead worker goes on with these
        if training.world.is_first:
            path.unlink(missing_ok=True)
        fellows.hear_first()
    impossible = _impossible(training)
    impossible[Wish.SAVE] = "a Trainer keeps no checkpoints; call its save() after fit()"
    return Callbacks(
        training.task.callbacks,
        ToldMarks.open(path),
        training.schedule,
        Outlet(),
        is_first=lambda: training.world.is_first,
        in_lockstep=training.conduct.is_lockstep,
        start_step=training.replica.start.step,
        impossible=impossible,
    )


def _impossible(training: Training) -> dict[Wish, str]:
    if training.evaluator is not None:
        return {}
    return {Wish.EVALUATE: "there is nothing to evaluate on; give the task a test set with test="}
