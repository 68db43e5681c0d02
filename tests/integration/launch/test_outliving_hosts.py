"""`data` on several hosts: one that is lost costs its slots alone, and not a bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.agents import LostHosts, SeenStarter, run_on_hosts, spread_cluster
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from shoal.errors import LaunchError
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.runs import start
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"
DATA_TASKS = Path(__file__).parents[1] / "data_tasks.py"


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents take it from their environment: so tests need not load torch for each."""
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


def on_one_host(job: Job, folder: Path, zygote: ZygoteProcess) -> dict[str, Any]:
    folder.mkdir()
    cluster = Cluster(workers=job.cluster.places, threads=1)
    alone = Job(target=job.target, args=job.args, cluster=cluster, run_dir=str(folder))
    return Supervisor(alone, lambda event: None, LocalEngine(zygote)).run()


@pytest.mark.parametrize("victims", [pytest.param(("host-0",), marks=pytest.mark.long), ("host-2", "host-1")])
def test_every_sample_is_applied_once_in_each_epoch(victims: tuple[str, ...], tmp_path: Path) -> None:
    """The processes of other hosts live on; after two losses one of them does everything."""
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 16, "pause_s": 0.02},
        cluster=spread_cluster(workers=4, hosts=3),
    )
    strike = LostHosts(*victims, signs=tmp_path)
    results, events = run_on_hosts(job, tmp_path / "run", hosts=3, on_event=strike)
    told = Counter(event.kind for event in events)
    assert (told["host"], told["replaced"], told["restarted"]) == (len(victims), len(victims), 0)
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {16: 256}


@pytest.mark.parametrize(
    ("task", "args", "victim"),
    [
        pytest.param("mlp", {"steps": 200, "clip": 0.5}, "host-1", marks=pytest.mark.long),
        ("conv", {"steps": 60, "optimizer": "adamw"}, "host-0"),
    ],
)
def test_the_bits_are_those_of_an_undisturbed_run(
    task: str, args: dict[str, Any], victim: str, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    job = Job(target=f"{TASKS}:{task}", args=args, cluster=spread_cluster(workers=4, hosts=3))
    disturbed, events = run_on_hosts(job, tmp_path / "run", hosts=3, on_event=LostHosts(victim))
    assert [event.values["places"] for event in events if event.kind == "replaced"]
    assert disturbed["audit"]["clean"]
    assert disturbed["digest"] == on_one_host(job, tmp_path / "here", zygote)["digest"]


def places_lost(events: list[Event]) -> int:
    """How many places were found new workers; deaths at about the same time are told together."""
    return sum(len(event.values["places"]) for event in events if event.kind == "replaced")


@pytest.mark.parametrize(
    ("task", "args", "hosts", "victims"),
    [
        ("conv", {"steps": 40, "optimizer": "adamw"}, 2, (1,)),
        pytest.param("mlp", {"steps": 200}, 2, (0, 1), marks=pytest.mark.long),
        pytest.param("mlp", {"steps": 200, "clip": 0.5}, 4, (0, 2), marks=pytest.mark.long),
    ],
)
def test_a_worker_that_dies_alone_is_followed_with_the_same_bits(
    task: str, args: dict[str, Any], hosts: int, victims: Sequence[int], tmp_path: Path, zygote: ZygoteProcess
) -> None:
    """Without a checkpoint, on its own host; all other processes live on."""
    chaos = "; ".join(f"kill worker:{rank} at step {7 + 70 * number}" for number, rank in enumerate(victims))
    cluster = spread_cluster(workers=4, hosts=hosts)
    job = Job(target=f"{TASKS}:{task}", args=args, cluster=cluster, chaos=chaos)
    disturbed, events = run_on_hosts(job, tmp_path / "run", hosts=hosts)
    told = Counter(event.kind for event in events)
    assert (told["fault"], told["restarted"], told["host"]) == (len(victims), 0, 0)
    assert places_lost(events) == len(victims)
    assert disturbed["audit"]["clean"]
    assert disturbed["digest"] == on_one_host(job, tmp_path / "here", zygote)["digest"]


@pytest.mark.long
def test_a_dozen_deaths_leave_no_trace(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """At any moment of a step, of any worker of any host, one soon after the other, and while all evaluate."""
    dice = random.Random(7)
    faults = [f"kill worker:{dice.randrange(6)} at step {step}" for step in range(10, 250, 20)]
    cluster = spread_cluster(workers=6, hosts=3)
    args, chaos = {"steps": 300, "clip": 0.5}, "; ".join(faults)
    job = Job(target=f"{TASKS}:mlp", args=args, cluster=cluster, chaos=chaos, max_failures=20)
    disturbed, events = run_on_hosts(job, tmp_path / "run", hosts=3)
    told = Counter(event.kind for event in events)
    assert (told["fault"], places_lost(events), told["restarted"]) == (12, 12, 0)
    undisturbed = on_one_host(job, tmp_path / "here", zygote)
    assert disturbed["audit"]["clean"] and disturbed["digest"] == undisturbed["digest"]
    assert disturbed["results"] == undisturbed["results"]


@pytest.mark.long
@pytest.mark.parametrize("chaos", ["", "kill worker:0 at step 3"])
def test_samples_come_from_the_first_worker(chaos: str, tmp_path: Path, zygote: ZygoteProcess) -> None:
    """No other process makes the data set, unless it follows the first."""
    holder = tmp_path / "holder"
    cluster = spread_cluster(workers=3, hosts=2)
    job = Job(target=f"{DATA_TASKS}:shipped", args={"holder": str(holder)}, cluster=cluster, chaos=chaos)
    results, events = run_on_hosts(job, tmp_path / "run")
    made_by = holder.read_text().split()
    assert len(set(made_by)) == (2 if chaos else 1) and len(made_by) == 2 * len(set(made_by))
    assert Counter(event.kind for event in events)["replaced"] == bool(chaos)
    copied = Job(target=f"{DATA_TASKS}:copied", cluster=cluster)
    assert results["digest"] == on_one_host(copied, tmp_path / "here", zygote)["digest"]


@pytest.mark.long
def test_a_worker_that_raises_once_is_followed(tmp_path: Path) -> None:
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 6, "pause_s": 0.02},
        cluster=spread_cluster(workers=3, hosts=2),
    )

    def strike(event: Event, starter: SeenStarter) -> None:
        if event.kind == "steps" and not (tmp_path / "burst").exists():
            (tmp_path / "bomb").touch()
        elif event.kind == "replaced":
            (tmp_path / "hurry").touch()

    results, events = run_on_hosts(job, tmp_path / "run", on_event=strike)
    told = Counter(event.kind for event in events)
    assert (told["raised"] > 0, told["replaced"] > 0, told["restarted"]) == (True, True, 0)
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {6: 256}


def test_a_host_that_was_cut_off_comes_back_and_takes_the_state_from_another(
    tmp_path: Path, zygote: ZygoteProcess
) -> None:
    """Nothing is heard of it until the others have its work; then it ends what it ran, and joins again."""
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 24, "pause_s": 0.2},
        cluster=spread_cluster(workers=3, hosts=3),
    )
    cut: list[str] = []

    def strike(event: Event, starter: SeenStarter) -> None:
        if event.kind == "steps" and not cut:
            cut.append("host-1")
            starter.silence("host-1")
        elif event.kind == "replaced":
            starter.heal("host-1")
        elif event.kind == "scaled":
            (tmp_path / "hurry").touch()

    results, events = run_on_hosts(job, tmp_path / "run", hosts=3, on_event=strike, lease_s=4.0)
    told = [event.kind for event in events if event.kind in ("host", "replaced", "host_added", "scaled")]
    assert told == ["host", "replaced", "host_added", "scaled"]
    (scaled,) = [event.values for event in events if event.kind == "scaled"]
    assert (scaled["workers"], scaled["before"], scaled["hosts"]) == (3, 2, [[0], [1], [2]])
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {24: 256}


def test_a_host_leaves_on_request_and_another_comes(tmp_path: Path) -> None:
    job = {"args": {"signs": str(tmp_path), "epochs": 24, "pause_s": 0.2}, "progress": False}
    cluster = {"workers": 3, "threads": 1, "on": "local:3"}
    told: list[str] = []
    with start(str(COUNTING), cluster=cluster, runs=tmp_path / "runs", **job) as live:
        for event in live.events():
            if event.kind == "steps" and not told:
                with pytest.raises(LaunchError, match="cut into 3 places when it started"):
                    live.scale(hosts="+1")
                assert live.scale(hosts="-1")["hosts"] == 2
                told.append("asked")
            elif event.kind == "replaced":
                live.scale(hosts="3")
            elif event.kind == "scaled":
                (tmp_path / "hurry").touch()
            if event.kind in ("host", "replaced", "host_added", "scaled"):
                told.append(event.kind)
        run = live.wait()
    assert told == ["asked", "host", "replaced", "host_added", "scaled"]
    assert run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {24: 256}
