"""The words that say what a process is, what a run is for, and what each is at: the same on every floor."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a process is in its job."""

    WORKER = "worker"
    """It trains, evaluates or predicts; or runs a script."""
    SPARE = "spare"
    """It waits until it is given the place of a worker."""
    SERVER = "server"
    COORDINATOR = "coordinator"
    STANDBY = "standby"
    """It waits until it is to be the coordinator."""


class Purpose(StrEnum):
    """What a job is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    INSPECT = "inspect"
    """To say what a task is made of, without training it."""
    TRY = "try"
    """To find out in which form a task's steps are the fastest."""
    SCRIPT = "script"
    """To run a script of the user's, which knows nothing of Shoal's tasks."""


class State(StrEnum):
    """What a process is at, as it says itself."""

    STARTING = "starting"
    READY = "ready"
    """It has all that it needs, and can hear."""
    TRAINING = "training"
    EVALUATING = "evaluating"
    PREDICTING = "predicting"
    SAVING = "saving"
    """It waits for storage: however long that takes, it does not hang."""
    AUDITING = "auditing"
    """It counts what became of the data, for as long as that takes."""
    PREPARING = "preparing"
    """It compiles its passes, for as long as that takes."""
    SERVING = "serving"
    SCRIPT = "script"
    """The user's own code runs."""
    DONE = "done"
    ENDING = "ending"

    # What a beat says in place of TRAINING.
    COMPUTING = "computing"
    WAITING = "waiting"
    """For others."""

    # What others say of a process, or of a run.
    LOST = "lost"
    REPLACED = "replaced"
    """Another process has its place, and has not spoken yet."""
    STOPPED = "stopped"
