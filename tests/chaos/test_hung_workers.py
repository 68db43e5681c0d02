"""Workers and servers that are stopped, deadlock, or hold Python's lock: noticed, named, ended, replaced."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.observed import ObservedEngine
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job

pytestmark = pytest.mark.alone

TASKS = Path(__file__).with_name("hanging_tasks.py")
NOTICED_WITHIN_S = 6.0
"""Five seconds at most, and what a busy machine adds."""
STEPS = 400
FEW: dict[str, int] = {"steps": 60, "at_read": 160}
"""Enough for a task that deadlocks on its own, in step 20."""
SERVED = "ps:servers=2"


class Stopper(ObservedEngine):
    """An engine that stops one member for good, once training has come to a certain step.

    By then the member has told what is usual for it; a machine that is fast comes to the first steps before.
    """

    def __init__(self, zygote: ZygoteProcess, role: str, rank: int = 0, at_step: int = 150) -> None:
        super().__init__(zygote)
        self.stopped: list[str] = []
        self._victim = (role, rank)
        self._at_step = at_step

    def on_event(self, event: Event) -> None:
        if self.stopped or event.kind != "steps" or event.values["steps"][-1][0] < self._at_step:
            return
        role, rank = self._victim
        for hand in self.running(role):
            if hand.global_rank == rank:
                self.signal(hand, signal.SIGSTOP)
                self.stopped.append(hand.name)


class Run:
    """Trains the small task; keeps what was told."""

    def __init__(self, folder: Path, zygote: ZygoteProcess) -> None:
        self.folder = folder
        self.zygote = zygote
        self.events: list[Event] = []

    def __call__(
        self,
        name: str,
        *,
        engine: ObservedEngine | None = None,
        strategy: str = "data:via=arena",
        spares: int = 0,
        workers: int = 2,
        **args: Any,
    ) -> dict[str, Any]:
        self.run_dir = self.folder / name
        self.run_dir.mkdir()
        self.events = []
        on_event: Callable[[Event], None] = getattr(engine, "on_event", lambda event: None)

        def listen(event: Event) -> None:
            self.events.append(event)
            on_event(event)

        job = Job(
            target=f"{TASKS}:task",
            args={"steps": STEPS, **args},
            strategy=strategy,
            cluster=Cluster(workers=workers, threads=1, spares=spares),
            run_dir=str(self.run_dir),
            options={"state": str(self.run_dir / "state.safetensors")},
        )
        return (engine or ObservedEngine(self.zygote)).run(job, listen)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in self.events if event.kind == kind]

    def the_hung(self) -> dict[str, Any]:
        """What was told of the one process that hung."""
        (hung,) = self.told("hung")
        assert 1.0 <= hung["seconds"] <= NOTICED_WITHIN_S
        assert hung["step"] > 5
        stacks = Path(hung["stacks"])
        assert stacks.parent == self.run_dir and stacks.name == f"stacks-{hung['step']}.txt"
        return hung


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Run:
    return Run(tmp_path, zygote)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> dict[str, Any]:
    """What comes out where nothing hangs."""
    run = Run(tmp_path_factory.mktemp("calm"), zygote)
    results = run("calm")
    assert not run.told("hung")
    return results


def digests(results: dict[str, Any]) -> tuple[Any, ...]:
    return results["digest"], results["state_digest"], results["loss"]


def test_a_stopped_worker_is_replaced_and_no_bit_changes(run: Run, calm: dict[str, Any]) -> None:
    stopper = Stopper(run.zygote, "worker", 1)
    results = run("stopped", engine=stopper, spares=1)
    assert stopper.stopped == ["worker 1"]
    hung = run.the_hung()
    assert (hung["role"], hung["rank"]) == ("worker", 1)
    assert "it is stopped (SIGSTOP)" in hung["reason"]
    text = Path(hung["stacks"]).read_text()
    assert "== worker 0 ==" in text and "in wait" in text, "the other waits for it"
    assert [lost["rank"] for lost in run.told("lost")] == [1] and len(run.told("replaced")) == 1
    assert digests(results) == digests(calm)


@pytest.mark.parametrize(
    ("how", "reason"), [("deadlock", "its main thread did not move"), ("hold_lock", "holds Python's lock")]
)
def test_a_worker_that_gets_stuck_is_named_and_replaced(
    run: Run, calm: dict[str, Any], how: str, reason: str
) -> None:
    mark = run.folder / "mark"
    results = run("stuck", spares=1, how=how, mark=str(mark))
    assert mark.exists()
    hung = run.the_hung()
    assert (hung["role"], hung["rank"]) == ("worker", 1)
    assert reason in hung["reason"]
    assert hung["where"].endswith(f" in {how}") and "hanging_tasks.py:" in hung["where"]
    assert [lost["rank"] for lost in run.told("lost")] == [1] and len(run.told("replaced")) == 1
    assert digests(results) == digests(calm)


def test_over_sockets_the_failure_names_rank_and_line(run: Run) -> None:
    """These workers cannot be replaced, and wait in calls from which they cannot look up."""
    mark = run.folder / "mark"
    with pytest.raises(WorkerFailed, match=r"Worker 1 hung .*hanging_tasks\.py:\d+ in deadlock") as raised:
        run("sockets", strategy="data:via=backend", how="deadlock", mark=str(mark), **FEW)
    assert mark.exists()
    assert raised.value.global_rank == 1
    assert run.the_hung()["rank"] == 1


def test_a_stopped_server_is_replaced_and_no_bit_changes(run: Run, calm: dict[str, Any]) -> None:
    stopper = Stopper(run.zygote, "server", 1)
    results = run("server", engine=stopper, strategy=SERVED)
    assert stopper.stopped == ["server 1"]
    hung = run.the_hung()
    assert (hung["role"], hung["rank"]) == ("server", 1)
    assert results["audit"]["clean"]
    assert results["digest"] == calm["digest"]


def test_a_stopped_coordinator_is_replaced(run: Run) -> None:
    stopper = Stopper(run.zygote, "coordinator")
    results = run("coordinator", engine=stopper, strategy=SERVED)
    assert stopper.stopped == ["coordinator 0"]
    (hung,) = run.told("hung")
    assert hung["role"] == "coordinator" and hung["seconds"] <= NOTICED_WITHIN_S
    assert results["audit"]["clean"]


@pytest.mark.parametrize("strategy", [f"{SERVED},sync=asp", pytest.param(SERVED, marks=pytest.mark.long)])
def test_a_worker_of_a_served_job_that_deadlocks_is_replaced(run: Run, strategy: str) -> None:
    mark = run.folder / "mark"
    results = run("served", strategy=strategy, how="deadlock", mark=str(mark), **FEW)
    assert mark.exists()
    hung = run.the_hung()
    assert (hung["role"], hung["rank"]) == ("worker", 1)
    assert hung["where"].endswith(" in deadlock")
    assert results["audit"]["clean"]
