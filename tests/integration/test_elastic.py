"""A running job is given more and fewer servers and workers: shards move, nothing is lost, nothing stops."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.counting_task import SAMPLES
from shoal.launch.control import request_scale
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.messages import Load
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import start
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

pytestmark = pytest.mark.alone

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
GUARD_S = 60.0


class Scaler:
    """Asks for one size after the other: the next when the one before has been reached."""

    def __init__(self, folder: Path, sizes: list[dict[str, int]]) -> None:
        self.reached: list[dict[str, int]] = []
        self._folder = folder
        self._sizes = sizes
        self._living: Counter[str] = Counter()
        self._moved = 0
        self._news = threading.Condition()
        self._has_started = False
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        with self._news:
            if event.kind == "decision" and event.values["what"] == "joined":
                self._living[event.values["role"]] += 1
            elif event.kind == "decision" and event.values["what"] in ("end", "lost"):
                self._living[event.values["role"]] -= 1
            elif event.kind == "decision" and event.values["what"] == "moved":
                self._moved += 1
            elif event.kind == "steps":
                self._has_started = True
            self._news.notify_all()

    def finish(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        self._await(lambda: self._has_started)
        for size in self._sizes:
            if self._over:
                return
            request_scale(self._folder, workers=size.get("workers"), servers=size.get("servers"))
            wanted = {role: size[f"{role}s"] for role in ("worker", "server") if f"{role}s" in size}
            before, grows = self._moved, wanted.get("server", 0) > self._living["server"]
            self._await(lambda wanted=wanted: all(self._living[role] == count for role, count in wanted.items()))
            self._await(lambda before=before, grows=grows: self._moved > before or not grows)
            if not self._over:
                self.reached.append(size)

    def _await(self, is_true: Any) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._over or is_true(), GUARD_S)


def train(
    folder: Path,
    zygote: ZygoteProcess,
    strategy: str,
    sizes: list[dict[str, int]],
    *,
    steps: int,
    workers: int,
    slots: int | None = None,
    task: str = "mlp",
) -> tuple[dict[str, Any], Scaler, list[Event]]:
    folder.mkdir()
    job = Job(
        target=f"{TASKS}:{task}",
        args={"optimizer": "adamw"},
        strategy=strategy,
        slots=slots,
        cluster=Cluster(workers=workers, threads=1),
        overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 10_000},
        run_dir=str(folder),
    )
    events: list[Event] = []
    scaler = Scaler(folder, sizes)

    def listen(event: Event) -> None:
        events.append(event)
        scaler.on_event(event)

    try:
        return Supervisor(job, listen, LocalEngine(zygote)).run(), scaler, events
    finally:
        scaler.finish()


def test_servers_come_and_go_and_not_one_bit_changes(tmp_path: Path, zygote: ZygoteProcess) -> None:
    steps, sizes = 700, [{"servers": 3}, {"servers": 2}]
    calm, _, _ = train(tmp_path / "calm", zygote, "data:via=arena", [], steps=steps, workers=2)
    results, scaler, events = train(
        tmp_path / "scaled", zygote, "ps:servers=2,shards=6", sizes, steps=steps, workers=2
    )
    assert scaler.reached == sizes, "the run was over before it had been scaled"
    moved = [event for event in events if event.kind == "decision" and event.values["what"] == "moved"]
    assert moved, [event.values["text"] for event in events if event.kind == "decision"]
    assert results["digest"] == calm["digest"]
    assert results["audit"]["clean"]


def test_workers_come_and_go(tmp_path: Path, zygote: ZygoteProcess) -> None:
    steps, sizes = 1000, [{"workers": 4}, {"workers": 1}, {"workers": 2, "servers": 1}]
    results, scaler, _ = train(tmp_path / "scaled", zygote, "ps:servers=2,sync=asp", sizes, steps=steps, workers=2)
    assert scaler.reached == sizes, "the run was over before it had been scaled"
    assert results["audit"]["clean"]
    assert all(row["once"] == 2 * steps for row in results["audit"]["shards"])


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        ("mlp", "ps:servers=2,shards=6"),
        pytest.param("mlp", "ps:servers=2,wire=tcp", marks=pytest.mark.long),
        pytest.param("conv", "ps:servers=2", marks=pytest.mark.long),
        pytest.param("contrastive", "ps", marks=pytest.mark.long),
    ],
)
def test_workers_of_a_synchronous_run_come_and_go_and_not_one_bit_changes(
    tmp_path: Path, zygote: ZygoteProcess, task: str, strategy: str
) -> None:
    steps, sizes = 900, [{"workers": 4}, {"workers": 1}]
    shape: dict[str, Any] = {"steps": steps, "workers": 2, "slots": 4, "task": task}
    calm, _, _ = train(tmp_path / "calm", zygote, "data:via=arena", [], **shape)
    results, scaler, _ = train(tmp_path / "scaled", zygote, strategy, sizes, **shape)
    assert scaler.reached == sizes, "the run was over before it had been scaled"
    assert results["digest"] == calm["digest"]
    assert results["audit"]["clean"]


class Counts:
    """A run of the model that counts its samples, scaled to one number of workers after the other."""

    EPOCHS, SLOTS = 60, 4

    def __init__(self, folder: Path, zygote: ZygoteProcess, strategy: str, sizes: list[int]) -> None:
        living, left = Counter[str](), list(sizes)
        with start(
            str(COUNTING),
            args={"signs": str(folder), "epochs": self.EPOCHS, "pause_s": 0.05},
            strategy=strategy,
            slots=self.SLOTS,
            cluster={"workers": 2, "threads": 1},
            runs=folder / "runs",
            zygote=zygote,
        ) as live:
            for event in live.events():
                what = event.values.get("what") if event.kind == "decision" else None
                if what in ("joined", "end") and event.values["role"] == "worker":
                    living["worker"] += 1 if what == "joined" else -1
                    left = left[1:] if left and living["worker"] == left[0] and self._asked == left[0] else left
                if event.kind == "steps" and left and self._asked != left[0]:
                    self._asked = left[0]
                    request_scale(live.folder, workers=self._asked)
                if not left:
                    (folder / "hurry").touch()
            self.run = live.wait()
        self.left = left

    _asked = 0


@pytest.mark.parametrize(
    "sync", ["ssp:2", *(pytest.param(sync, marks=pytest.mark.long) for sync in ("bsp", "alternate:2", "ssp:1"))]
)
def test_each_sample_counts_once_whoever_trains_on_it(tmp_path: Path, zygote: ZygoteProcess, sync: str) -> None:
    counted = Counts(tmp_path, zygote, f"ps:servers=2,sync={sync}", [3, 1, 4])
    assert counted.left == [], "the run was over before it had been scaled"
    assert counted.run.results["audit"]["clean"]
    assert Counter(applied(counted.run.folder / "model.safetensors")) == {Counts.EPOCHS: SAMPLES}


@pytest.mark.long
def test_a_quorum_goes_on_while_its_workers_come_and_go(tmp_path: Path, zygote: ZygoteProcess) -> None:
    counted = Counts(tmp_path, zygote, "ps:servers=2,sync=quorum:3/4", [3, 1, 4])
    assert counted.left == [] and counted.run.results["audit"]["clean"]
    rows = counted.run.results["audit"]["shards"]
    assert all(row["more_than_once"] == 0 for row in rows) and rows[0]["once"] > 0


@pytest.mark.long
@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:2"])
def test_workers_of_servers_come_as_the_load_allows(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    """Each sample is applied once in each epoch, however many there are."""
    monkeypatch.setattr(LocalHost, "measure_load", lambda host: Load(idle_cores=2.0, waiting=0.0))
    told: list[str] = []
    with start(
        str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 40, "pause_s": 0.1},
        strategy=f"ps:servers=1,sync={sync}",
        cluster={"workers": "1:2", "threads": 1},
        runs=tmp_path / "runs",
        zygote=zygote,
    ) as live:
        for event in live.events():
            text = str(event.values.get("text", ""))
            if event.kind == "decision" and "from 1 to 2 workers" in text:
                told.append(text)
            if told and event.kind == "steps":
                (tmp_path / "hurry").touch()
        run = live.wait()
    assert told and told[0] == "from 1 to 2 workers, because 2.0 cores are idle"
    assert run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {40: SAMPLES}
