"""Workers that raise: replaced once, and a batch that nobody can compute ends the run with the sample's index."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import WorkerFailed
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("faulty_tasks.py")
BAD = 57


@dataclass
class Run:
    """Trains a task with a bad sample, with two workers."""

    folder: Path
    zygote: ZygoteProcess
    events: list[Event] = field(default_factory=list)

    def __call__(self, kind: str, *, workers: int = 2, **job: Any) -> dict[str, Any]:
        self.events = []
        folder = self.folder / f"{kind}-{len(list(self.folder.iterdir()))}"
        asked = Job(
            target=f"{TASKS}:task",
            args={"kind": kind, "marker": str(self.folder / "marker") if kind == "once" else ""},
            cluster=Cluster(workers=workers, threads=1),
            run_dir=str(folder),
            options={"state": str(folder / "state")},
            **job,
        )
        return Supervisor(asked, self.events.append, LocalEngine(self.zygote)).run()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in self.events if event.kind == kind]


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Run:
    return Run(tmp_path, zygote)


@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_a_worker_that_raises_once_is_followed_by_another(run: Run, policy: str) -> None:
    calm = run("sound")
    found = run("once", on_failure=policy)
    (raised,) = run.told("raised")
    assert raised["error"] == f"ValueError: sample {BAD} is broken" and raised["sample"] is None
    assert len(run.told("lost")) == len(run.told("replaced")) == 1
    assert (found["digest"], found["state_digest"]) == (calm["digest"], calm["state_digest"])


@pytest.mark.parametrize(("kind", "error"), [("always", "is broken"), ("model", "too much")])
def test_a_poisoned_batch_ends_the_run_and_names_the_sample(run: Run, kind: str, error: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"{error}.* is number {BAD}\. ") as failure:
        run(kind)
    raised = run.told("raised")
    assert len(raised) == 2 and len(run.told("lost")) == 1, "two processes tried"
    step, slot = raised[0]["step"], raised[0]["slot"]
    assert f"at slot {slot} of step {step}," in str(failure.value)
    assert all((one["step"], one["slot"], one["sample"]) == (step, slot, BAD) for one in raised)


def test_labels_that_do_not_fit_are_not_blamed_on_one_sample(run: Run) -> None:
    with pytest.raises(WorkerFailed, match=r"not one sample that raises it, but (all|\d) of 8 that were tried"):
        run("labels")
    assert all(one["tried"] == 8 and one["raising"] > 1 for one in run.told("raised"))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_with_servers_a_worker_that_raises_once_is_followed_by_another(run: Run, sync: str) -> None:
    found = run("once", strategy=f"ps:sync={sync}")
    (raised,), (lost,), (replaced,) = run.told("raised"), run.told("lost"), run.told("replaced")
    assert raised["error"] == f"ValueError: sample {BAD} is broken"
    assert lost["role"] == replaced["role"] == "worker" and lost["rank"] == replaced["rank"]
    assert found["audit"]["clean"]


def test_with_servers_a_poisoned_batch_ends_the_run_and_names_the_sample(run: Run) -> None:
    with pytest.raises(WorkerFailed, match=rf"is broken.* is number {BAD}\. "):
        run("always", strategy="ps:sync=bsp")
    assert len(run.told("raised")) == 2 and len(run.told("lost")) == 1, "two processes tried"


def test_who_wants_to_stop_is_stopped_at_once(run: Run) -> None:
    with pytest.raises(WorkerFailed, match=f"sample {BAD} is broken"):
        run("once", on_failure="stop")
    assert not run.told("lost") and run.told("raised")


def test_one_worker_alone_is_not_followed(run: Run) -> None:
    with pytest.raises(WorkerFailed, match=f"sample {BAD} is broken"):
        run("always", workers=1)
    (raised,) = run.told("raised")
    assert raised["sample"] == BAD and not run.told("lost")


def test_too_many_failures_end_the_run(run: Run) -> None:
    with pytest.raises(WorkerFailed, match=r"failure number 1 within a minute, and max_failures=0"):
        run("once", max_failures=0)
    assert not run.told("lost")
