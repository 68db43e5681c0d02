"""Servers, workers and the coordinator of a served job are killed as it trains: nothing is lost, nothing twice."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.observed import ObservedEngine
from shoal.checkpoint.model_file import load_tensors
from shoal.launch.local import LocalHost
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
GUARD_S = 90.0


class Killer(ObservedEngine):
    """An engine whose members are killed, one after the other; the next when all has been made whole again."""

    def __init__(self, zygote: ZygoteProcess, victims: Sequence[str]) -> None:
        super().__init__(zygote)
        self.killed: Counter[str] = Counter()
        self.seconds_to_serve: list[float] = []
        """From the kill of a server to the moment its shards were served again."""
        self._victims = victims
        self._random = Random(5)
        self._whole = threading.Condition()
        self._unfilled = self._missing = 0
        self._missing_role = ""
        self._killed_at = 0.0
        self._has_started = False
        self._over = False

    def open(self, job: Job) -> LocalHost:
        host = super().open(job)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return host

    def on_event(self, event: Event) -> None:
        """Follow what is missing: a process that was killed, backups that are not filled yet."""
        with self._whole:
            what = event.values.get("what") if event.kind == "decision" else None
            if what == "backup":
                self._unfilled += 1
            elif what == "filled":
                self._unfilled -= 1
            elif what == "joined":
                self._missing -= event.values["role"] == self._missing_role
            elif what == "promoted":
                self.seconds_to_serve.append(time.monotonic() - self._killed_at)
            elif event.kind == "replaced" and event.values["role"] == "coordinator":
                self._missing -= 1
            elif event.kind == "steps":
                self._has_started = True
            self._whole.notify_all()

    def finish(self) -> None:
        with self._whole:
            self._over = True
            self._whole.notify_all()
        self._thread.join()

    def _run(self) -> None:
        for role in self._victims:
            self._await_wholeness()
            with self._whole:
                if self._over:
                    return
                self._missing, self._missing_role = 1, role
            self._kill(role)

    def _await_wholeness(self) -> None:
        """Until everybody is there and every backup is filled; what a joining entails is told a moment later."""

        def is_whole() -> bool:
            return self._over or (self._has_started and self._missing <= 0 >= self._unfilled)

        for _ in range(2):
            with self._whole:
                assert self._whole.wait_for(is_whole, GUARD_S)
            time.sleep(self._random.uniform(0.05, 0.1))

    def _kill(self, role: str) -> None:
        self._killed_at = time.monotonic()
        self.signal(self._random.choice(self.running(role)), signal.SIGKILL)
        self.killed[role] += 1


def run(
    folder: Path, engine: ObservedEngine, strategy: str, *, steps: int, on_event: Any = lambda event: None
) -> tuple[dict[str, Any], list[Event]]:
    folder.mkdir()
    job = Job(
        target=f"{TASKS}:mlp",
        args={"width": 200, "optimizer": "adamw", "clip": 0.5},
        strategy=strategy,
        cluster=Cluster(workers=2, threads=1),
        overrides={"evaluate_every": 10_000, "max_steps": steps, "epochs": steps},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        on_event(event)

    return engine.run(job, listen), events


def train_under_fire(
    folder: Path, zygote: ZygoteProcess, strategy: str, victims: Sequence[str], *, steps: int
) -> tuple[Killer, dict[str, Any], list[Event]]:
    killer = Killer(zygote, victims)
    try:
        results, events = run(folder, killer, strategy, steps=steps, on_event=killer.on_event)
    finally:
        killer.finish()
    assert killer.killed == Counter(victims), "not every fault fired: the run was over too soon"
    assert Counter(event.values["role"] for event in events if event.kind == "lost") == Counter(victims)
    assert results["audit"]["clean"], results["audit"]
    return killer, results, events


VICTIMS = ("server", "coordinator", "worker", "server", "coordinator", "worker", "server", "worker", "server")


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(5, 600), (9, 1000)],
)
@pytest.mark.long  # `test_injected_faults.py` has one kill of each role
def test_kills_change_no_bit_in_lockstep(tmp_path: Path, zygote: ZygoteProcess, kills: int, steps: int) -> None:
    calm, _ = run(tmp_path / "calm", ObservedEngine(zygote), "data:via=arena", steps=steps)
    victims = VICTIMS[:kills]
    _, results, _ = train_under_fire(tmp_path / "fire", zygote, "ps:servers=2,shards=4", victims, steps=steps)
    assert results["digest"] == calm["digest"]
    assert results["loss"] == calm["loss"]
    states = [load_tensors(tmp_path / name / "state.safetensors") for name in ("calm", "fire")]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("strategy", "kills", "steps"),
    [
        ("ps:servers=2,sync=ssp:3,wire=tcp", 4, 600),
        ("ps:servers=3,sync=asp", 4, 600),
    ],
)
@pytest.mark.long  # `test_counted_samples.py` has one kill of each role
def test_every_update_counts_once(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, kills: int, steps: int
) -> None:
    _, results, _ = train_under_fire(tmp_path / "run", zygote, strategy, VICTIMS[:kills], steps=steps)
    for row in results["audit"]["shards"]:
        assert row["once"] == 2 * steps and row["never"] == row["more_than_once"] == 0


@pytest.mark.parametrize("strategy", ["ps:servers=2", "ps:servers=2,sync=asp"])
def test_a_worker_killed_before_it_joins_is_followed_at_once(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str
) -> None:
    """As by the kernel, for want of memory, while it builds its model."""
    mark = tmp_path / "mark"
    job = Job(
        target=f"{Path(__file__).with_name('hanging_tasks.py')}:killed_task",
        args={"mark": str(mark), "steps": 20},
        strategy=strategy,
        cluster=Cluster(workers=2, threads=1),
    )
    events: list[Event] = []
    results = ObservedEngine(zygote).run(job, events.append)
    assert mark.exists()
    assert [event.values["role"] for event in events if event.kind == "lost"] == ["worker"]
    assert results["audit"]["clean"]


@pytest.mark.parametrize(
    "strategy",
    ["ps:servers=2,wire=tcp", pytest.param("ps:servers=2,wire=tcp,compress=topk:0.5", marks=pytest.mark.long)],
)
def test_a_worker_killed_between_two_shards_leaves_what_the_others_lack(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str
) -> None:
    """Its successor cannot make it again: the shard that has it is a step ahead."""
    mark, digests = tmp_path / "mark", []
    for name in ("torn", "calm"):  # it is killed once
        (tmp_path / name).mkdir()
        job = Job(
            target=f"{Path(__file__).with_name('hanging_tasks.py')}:torn_task",
            args={"mark": str(mark), "steps": 20},
            strategy=strategy,
            cluster=Cluster(workers=2, threads=1),
            run_dir=str(tmp_path / name),
        )
        events: list[Event] = []
        digests.append(ObservedEngine(zygote).run(job, events.append)["digest"])
        assert [event.kind for event in events].count("lost") == (name == "torn")
    assert digests[0] == digests[1]


FOLLOWED = ("server", "server", "coordinator", "worker", "server", "server")


@pytest.mark.parametrize(
    ("strategy", "kills", "steps"),
    [
        ("ps", 2, 250),
        pytest.param("ps", 6, 600, marks=pytest.mark.long),
        pytest.param("ps:servers=2,replicas=0,shards=4", 6, 600, marks=pytest.mark.long),
    ],
)
def test_a_server_without_backup_is_followed_and_no_bit_changes(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, kills: int, steps: int
) -> None:
    victims = FOLLOWED[:kills]
    calm, _ = run(tmp_path / "calm", ObservedEngine(zygote), "data:via=arena", steps=steps)
    _, results, events = train_under_fire(tmp_path / "fire", zygote, strategy, victims, steps=steps)
    assert any(event.values.get("what") == "adopted" for event in events if event.kind == "decision")
    assert (results["digest"], results["loss"]) == (calm["digest"], calm["loss"])
    states = [load_tensors(tmp_path / name / "state.safetensors") for name in ("calm", "fire")]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("strategy", "kills", "steps"),
    [
        ("ps:sync=asp", 2, 250),
        pytest.param("ps:sync=asp", 5, 600, marks=pytest.mark.long),
        pytest.param("ps:sync=ssp:2", 5, 600, marks=pytest.mark.long),
    ],
)
def test_what_a_server_without_backup_has_counts_once(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, kills: int, steps: int
) -> None:
    victims = ("server", "worker", "coordinator", "server", "server")[:kills]
    _, results, _ = train_under_fire(tmp_path / "run", zygote, strategy, victims, steps=steps)
    for row in results["audit"]["shards"]:
        assert row["once"] == 2 * steps and row["never"] == row["more_than_once"] == 0


@pytest.mark.parametrize(
    ("agree", "kills", "steps"),
    [
        ("allreduce", 1, 150),
        pytest.param("allreduce", 2, 300, marks=pytest.mark.long),
        pytest.param("ring", 2, 300, marks=pytest.mark.long),
    ],
)
def test_a_whole_copy_outlives_its_server(
    tmp_path: Path, zygote: ZygoteProcess, agree: str, kills: int, steps: int
) -> None:
    strategy, victims = f"ps:servers=host,agree={agree}", ("server",) * kills
    calm, _ = run(tmp_path / "calm", ObservedEngine(zygote), strategy, steps=steps)
    _, results, _ = train_under_fire(tmp_path / "fire", zygote, strategy, victims, steps=steps)
    assert (results["digest"], results["loss"]) == (calm["digest"], calm["loss"])
