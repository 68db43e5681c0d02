"""How runs end: what is said at the end is true, whoever was lost shortly before."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.observed import ObservedEngine
from helpers.striking import Striker
from helpers.warm_commands import WarmCommands
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train
from shoal.observe import Event, read_events
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("ending_tasks.py")
STEPS = 20
"""Of one epoch."""


@dataclass
class Run:
    """Trains one of the tasks, under a striker where there is one."""

    folder: Path
    zygote: ZygoteProcess
    events: list[Event] = field(default_factory=list)

    def __call__(self, kind: str, striker: Striker | None = None, **job: Any) -> dict[str, Any]:
        self.events = []
        folder = self.folder / f"run-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        asked = Job(
            target=f"{TASKS}:task",
            args={"kind": kind, **job.pop("args", {})},
            cluster=Cluster(workers=2, threads=1),
            run_dir=str(folder),
            **job,
        )
        return (striker or ObservedEngine(self.zygote)).run(asked, self.events.append)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in self.events if event.kind == kind]


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Run:
    return Run(tmp_path, zygote)


def has_stepped(event: Event) -> bool:
    return event.kind == "steps"


def looks_for_the_last_time(event: Event) -> bool:
    return event.kind == "state" and event.values == {"state": "evaluating", "step": STEPS}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_worker_alone_is_that_workers_death(run: Run, zygote: ZygoteProcess, signum: int) -> None:
    calm = run("looking")
    striker = Striker(zygote, 0, signum, has_stepped)
    found = run("looking", striker)
    (lost,) = run.told("lost")
    assert striker.struck == 1 and signal.Signals(signum).name in lost["reason"] and run.told("replaced")
    assert (found["digest"], found["reason"]) == (calm["digest"], "finished")


def test_a_signal_to_all_processes_stops_the_run(run: Run, zygote: ZygoteProcess) -> None:
    """As a batch system sends it: the workers are gone before anybody could ask them to stop."""
    engine = ObservedEngine(zygote)

    def signal_all(event: Event) -> None:
        if event.kind == "steps" and engine.running("worker"):
            os.kill(os.getpid(), signal.SIGINT)
            for worker in engine.running("worker"):
                engine.signal(worker, signal.SIGINT)
            time.sleep(0.5)  # Their ends are there when the supervisor looks next.

    job = Job(target=f"{TASKS}:task", args={"epochs": 100_000}, cluster=Cluster(workers=2, threads=1))
    events: list[Event] = []
    with pytest.raises(Interrupted):
        engine.run(job, lambda event: (events.append(event), signal_all(event))[0])
    assert not [event for event in events if event.kind == "lost"]


def test_who_follows_the_first_worker_at_the_very_end_knows_its_loss(run: Run, zygote: ZygoteProcess) -> None:
    striker = Striker(zygote, 0, signal.SIGKILL, looks_for_the_last_time)
    found = run("looking", striker, strategy="ps:sync=asp")
    assert striker.struck == 1 and len(run.told("replaced")) == 1
    known = [loss for told in run.told("steps") for _, loss in told["steps"] if loss is not None]
    assert found["loss"] == (known or [found["loss"]])[-1] > 0, "known to nobody only if another did all the steps"
    assert found["steps"] == STEPS and found["audit"]["clean"]


def test_a_loss_below_zero_that_falls_is_no_divergence(run: Run) -> None:
    found = run("negative", strategy="ps:sync=asp", args={"epochs": 10})
    known = [loss for told in run.told("steps") for _, loss in told["steps"] if loss is not None]
    assert found["loss"] < max(known) < 0, "it fell"
    assert not run.told("warning")


def test_a_failed_run_ends_when_it_ends(tmp_path: Path, zygote: ZygoteProcess) -> None:
    with pytest.raises(WorkerFailed, match="there is no such model"):
        train(f"{TASKS}:task", args={"kind": "failing"}, runs=tmp_path, name="mine", progress=False, zygote=zygote)
    events = read_events(tmp_path / "mine")
    (stopped,) = (event for event in events if event.kind == "stopped")
    assert stopped.time == max(event.time for event in events if event.kind != "memory")


def test_what_json_prints_is_json(tmp_path: Path, warm_commands: WarmCommands) -> None:
    words = ["train", f"{TASKS}:task", "--arg", "kind=unmeasured", "--name", "mine", "--json"]
    answer = warm_commands(tmp_path, *words)
    assert answer.status == 0, answer.text
    for text in (answer.out, (tmp_path / "runs/mine/result.json").read_text()):
        json.loads(text, parse_constant=pytest.fail)
    assert answer.result["results"]["odd"] is None
