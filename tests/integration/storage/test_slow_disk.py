"""A disk that takes longer than anybody's patience: nobody is taken for hung, and every checkpoint comes to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import SMALL_TASK
from helpers.disk_faults import DiskFaults
from helpers.observed import ObservedEngine
from helpers.striking import Striker
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import DiskRefused, Interrupted
from shoal.launch.live import LiveRun
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import new_job
from shoal.observe import Event, RunFolder
from shoal.spec import Cluster, Job

STEPS, EVERY = 30, 10
LONGER_THAN_PATIENCE_S = 2.0
"""A worker of short steps that does not move for a second, while others wait, counts as hung."""


@dataclass
class Run:
    """Trains with two workers, and saves every 10 steps of 30."""

    folder: Path
    zygote: ZygoteProcess
    events: list[Event] = field(default_factory=list)

    def __call__(self, strategy: str, engine: ObservedEngine | None = None) -> dict[str, Any]:
        self.folder.mkdir()
        return (engine or ObservedEngine(self.zygote)).run(self.job(strategy), self.events.append)

    def job(self, strategy: str) -> Job:
        return Job(
            target=str(SMALL_TASK),
            strategy=strategy,
            cluster=Cluster(workers=2, threads=1),
            overrides={"max_steps": STEPS, "epochs": STEPS},
            checkpoint=f"every={EVERY},keep=5",
            run_dir=str(self.folder),
        )

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in self.events if event.kind == kind]

    def saved(self) -> list[int]:
        """The steps of the checkpoints that are there, every byte of them checked."""
        store = CheckpointStore(self.folder / "checkpoints")
        return [store.load(entry).step for entry in store.entries()]


@pytest.fixture
def run(tmp_path: Path, disk_zygote: ZygoteProcess) -> Run:
    return Run(tmp_path / "run", disk_zygote)


STRATEGIES = ("data", "ps:servers=2", "ps:servers=2,sync=asp", "sharded")
SERVED_IN_STEP = pytest.param("ps:servers=2", marks=pytest.mark.long)


@pytest.mark.parametrize(
    "strategy", ["data", "ps:servers=2,sync=asp", SERVED_IN_STEP, pytest.param("sharded", marks=pytest.mark.long)]
)
def test_who_waits_for_a_slow_disk_is_not_taken_for_hung(run: Run, disk: DiskFaults, strategy: str) -> None:
    """One fsync of the last two checkpoints is slow; the later waits for the earlier, and the end for both."""
    disk.watch(run.folder, contains="manifest", operations="fsync")
    disk.delay(LONGER_THAN_PATIENCE_S, first=2)
    found = run(strategy)
    assert disk.fired == STEPS // EVERY - 1
    assert not run.told("hung") and not run.told("lost")
    assert run.saved() == [10, 20, 30] == found["due_checkpoints"]
    assert found["audit"]["clean"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nobody_is_taken_for_hung_where_every_fsync_is_slow(run: Run, disk: DiskFaults, strategy: str) -> None:
    """The coordinator's memory is on that disk, too."""
    disk.watch(run.folder, operations="fsync fdatasync")
    disk.delay(3.0)
    found = run(strategy)
    assert disk.fired > 3 * STEPS // EVERY
    assert not run.told("hung") and not run.told("lost")
    assert run.saved() == [10, 20, 30] and (run.folder / "model.safetensors").is_file()
    assert found["audit"]["clean"]


def is_saving_after(step: int) -> Callable[[Event], bool]:
    def moment(event: Event) -> bool:
        told = event.values
        return event.kind == "beat" and event.rank == 0 and (told["phase"], told["step"]) == ("saving", step)

    return moment


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        ("data", 20),
        ("ps:servers=2", STEPS),
        pytest.param("data", STEPS, marks=pytest.mark.long),
        pytest.param("ps:servers=2", 20, marks=pytest.mark.long),
    ],
)
def test_what_the_dead_had_to_save_its_successor_saves(
    run: Run, disk: DiskFaults, disk_zygote: ZygoteProcess, strategy: str, step: int
) -> None:
    """Killed while it waits for the disk, in the middle (with the save before in flight) and at the end."""
    disk.watch(run.folder, contains="manifest", operations="fsync")
    disk.delay(LONGER_THAN_PATIENCE_S, 1, step // EVERY)
    striker = Striker(disk_zygote, 0, signal.SIGKILL, is_saving_after(step))
    found = run(strategy, striker)
    assert striker.struck == 1 and len(run.told("replaced")) == 1
    assert max(run.saved()) == STEPS and set(found.get("due_checkpoints", ())) <= set(run.saved())
    if step < STEPS:
        assert 20 < min(run.saved()) < STEPS, "what was due came as soon as it could"
    assert found["audit"]["clean"]


@pytest.mark.parametrize("strategy", ["data", "ps:servers=2,sync=asp", SERVED_IN_STEP])
def test_who_follows_a_worker_that_was_saving_on_request_does_not_train_on(
    run: Run, disk: DiskFaults, disk_zygote: ZygoteProcess, strategy: str
) -> None:
    """The others are gone by then: its successor saves the step after which all have stopped."""
    disk.watch(run.folder, contains="manifest", operations="fsync")
    disk.delay(LONGER_THAN_PATIENCE_S, 1, 1)
    first = iter([True])

    def is_stopped_and_saves(event: Event) -> bool:
        if event.kind == "steps" and next(first, False):
            os.kill(os.getpid(), signal.SIGINT)
        return event.kind == "beat" and event.rank == 0 and event.values["phase"] == "saving"

    striker = Striker(disk_zygote, 0, signal.SIGKILL, is_stopped_and_saves)
    with pytest.raises(Interrupted, match="after the step it was in"):
        run.folder.mkdir()
        longer = {"max_steps": 100_000, "epochs": 100_000}
        striker.run(replace(run.job(strategy), overrides=longer, checkpoint="every=1h"), run.events.append)
    assert striker.struck == 1 and len(run.told("replaced")) == 1
    (done,) = (told["results"] for told in run.told("done") if "digest" in told["results"])
    assert run.saved() == [done["steps"]] and done["reason"] == "stopped"
    assert (run.folder / "model.safetensors").is_file()


class Spoiler:
    """A sink that puts a file in the place of all checkpoints when the first one is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = count()

    def handle(self, event: Event) -> None:
        # A saver that is at it may make the folder anew in between.
        while event.kind == "checkpoint" and self._folder.is_dir():
            self._folder.rename(self._folder.with_name(f"taken-{next(self._count)}"))
            self._folder.touch()

    def close(self) -> None: ...


def test_a_run_without_all_its_checkpoints_does_not_end_well(tmp_path: Path, zygote: ZygoteProcess) -> None:
    folder = RunFolder.create(tmp_path, "mine")
    said = {"checkpoint": "every=10,keep=2", "overrides": {"max_steps": STEPS, "epochs": STEPS}}
    job = new_job(str(SMALL_TASK), None, {}, said)
    job = replace(job, run_dir=str(folder.path))
    with pytest.raises(DiskRefused, match=r"came to its end, but .* lacks what was due after step 20, 30; "):
        LiveRun(job, folder, [Spoiler(folder.checkpoints)], zygote=zygote).run()
    assert folder.model.is_file() and folder.read_result()["ended"] == "finished"
