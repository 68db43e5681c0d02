"""A synchronous run is given fewer and more workers, by hand and by load, and not one bit changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Interrupted, LaunchError
from shoal.launch import elastic, load
from shoal.launch.control import request_scale
from shoal.launch.local import LocalEngine
from shoal.launch.messages import Load
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

pytestmark = pytest.mark.alone

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
GUARD_S = 60.0


class Hand:
    """Asks for one size after the other: the next when the one before has been reached. Then it stops the run."""

    def __init__(self, folder: Path, sizes: list[int], on_world: Callable[[Path], None] | None = None) -> None:
        self.error: BaseException | None = None
        self._folder = folder
        self._sizes = sizes
        self._on_world = on_world
        self._news = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._has_begun = False

    def on_event(self, event: Event) -> None:
        if event.kind == "scaled" or (event.kind == "steps" and not self._has_begun):
            self._has_begun = True
            self._news.release()

    def join(self) -> None:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            assert self._news.acquire(timeout=GUARD_S)
            if self._on_world is not None:
                self._on_world(self._folder)
            for size in self._sizes:
                request_scale(self._folder, workers=size)
                assert self._news.acquire(timeout=GUARD_S), f"{size} workers were never reached"
        except BaseException as error:
            self.error = error
        os.kill(os.getpid(), signal.SIGINT)


def train(
    folder: Path, zygote: ZygoteProcess, steps: int, workers: int | str, watcher: Any = None, **job: Any
) -> tuple[dict[str, Any], list[Event]]:
    asked = Job(
        target=f"{TASKS}:mlp",
        args={"optimizer": "adamw", "clip": 1.0, **job.pop("args", {})},
        cluster=Cluster(workers=workers, threads=1),
        overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 50},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
        **job,
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if watcher is not None:
            watcher.on_event(event)

    folder.mkdir(exist_ok=True)
    try:
        Supervisor(asked, listen, LocalEngine(zygote)).run()
    except Interrupted:
        assert watcher is not None
    finally:
        if watcher is not None:
            watcher.join()
    return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events


def same_bits(left: dict[str, Any], right: dict[str, Any]) -> bool:
    names = ("steps", "digest", "state_digest", "loss")
    return [left[name] for name in names] == [right[name] for name in names]


def test_workers_leave_and_come_and_not_one_bit_changes(tmp_path: Path, zygote: ZygoteProcess) -> None:
    def refused(folder: Path) -> None:
        assert request_scale(folder)["text"] == "4 workers."
        with pytest.raises(LaunchError, match=r"cut into 4 places .* start it with --workers 4:5 to have up to 5"):
            request_scale(folder, workers=5)
        with pytest.raises(LaunchError, match="has no servers"):
            request_scale(folder, servers=2)

    hand = Hand(tmp_path / "scaled", [1, 3, 2], refused)
    found, events = train(tmp_path / "scaled", zygote, 100_000, 4, hand)
    calm, _ = train(tmp_path / "calm", zygote, found["steps"], 4)
    scaled = [event.values for event in events if event.kind == "scaled"]
    assert [(one["before"], one["workers"]) for one in scaled] == [(4, 1), (1, 3), (3, 2)]
    assert [sorted(map(len, one["hosts"])) for one in scaled] == [[4], [1, 1, 2], [2, 2]]
    assert not [event for event in events if event.kind in ("lost", "warning") and "stopping" not in str(event)]
    assert same_bits(found, calm)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("average:every=7,outer=nesterov", "adamw"),
        ("average:every=5,init=own", "muon_like"),
        pytest.param("average:every=3,with=pairs", "recalling", marks=pytest.mark.long),
        pytest.param("average:every=6,combine=ensemble", "adamw", marks=pytest.mark.long),
    ],
)
def test_models_of_their_own_stay_whoever_trains_them(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, optimizer: str
) -> None:
    hand, args = Hand(tmp_path / "scaled", [1, 3, 2]), {"optimizer": optimizer}
    found, events = train(tmp_path / "scaled", zygote, 100_000, 4, hand, strategy=strategy, args=args)
    calm, _ = train(tmp_path / "calm", zygote, found["steps"], 4, strategy=strategy, args=args)
    scaled = [event.values for event in events if event.kind == "scaled"]
    assert [(one["before"], one["workers"]) for one in scaled] == [(4, 1), (1, 3), (3, 2)]
    assert [sorted(map(len, one["hosts"])) for one in scaled] == [[4], [1, 1, 2], [2, 2]]
    assert same_bits(found, calm) and found["audit"]["clean"] and found["agreements"] == calm["agreements"]


def test_an_optimizer_that_runs_whole_stays_with_the_first_place(tmp_path: Path, zygote: ZygoteProcess) -> None:
    hand = Hand(tmp_path / "scaled", [1, 2])
    args = {"optimizer": "muon_like", "clip": 0.0}
    found, events = train(tmp_path / "scaled", zygote, 100_000, 2, hand, args=args)
    calm, _ = train(tmp_path / "calm", zygote, found["steps"], 2, args=args)
    assert [event.values["workers"] for event in events if event.kind == "scaled"] == [1, 2]
    assert same_bits(found, calm)


class Growth:
    """Stops the run when the number of workers has changed so many times."""

    def __init__(self, changes: int) -> None:
        self._left = changes

    def on_event(self, event: Event) -> None:
        if event.kind == "scaled":
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGINT)

    def join(self) -> None:
        assert self._left <= 0


@pytest.mark.parametrize("strategy", ["data", "average:every=4,outer=nesterov"])
def test_workers_are_added_where_cores_are_idle(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(elastic, "COOL_DOWN_S", 0.2)
    monkeypatch.setattr(elastic, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(elastic, "GAIN", 0.0)
    monkeypatch.setattr(load, "starting_workers", lambda cluster: 1)
    monkeypatch.setattr(load, "read_load", lambda: Load(idle_cores=8.0, waiting=-7.0))
    found, events = train(tmp_path / "grown", zygote, 100_000, "1:4", Growth(3), strategy=strategy)
    calm, _ = train(tmp_path / "calm", zygote, found["steps"], 4, strategy=strategy)
    scaled = [event.values for event in events if event.kind == "scaled"]
    assert [one["workers"] for one in scaled[:3]] == [2, 3, 4] and "8.0 cores are idle" in scaled[0]["reason"]
    assert same_bits(found, calm)
