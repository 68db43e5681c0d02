"""`average` on several hosts: one that is lost costs its part of a round, which others make again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.agents import LostHosts, run_on_hosts, spread_cluster
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from shoal.checkpoint.listing import read_manifest
from shoal.errors import LaunchError
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.resuming import resumed_job
from shoal.launch.runs import start
from shoal.observe.checkpoint_names import find_checkpoint, folder_name
from shoal.spec import Job

DYING = Path(__file__).parents[1] / "dying_tasks.py"
DEADLY = 100
"""A sample that is read for the first time in the middle of a round."""
TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents take it from their environment: so tests need not load torch for each."""
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


@pytest.mark.parametrize("victims", [("host-0",), ("host-2", "host-1")])
def test_every_sample_is_applied_once_in_each_epoch(victims: tuple[str, ...], tmp_path: Path) -> None:
    """The processes of other hosts live on; after two losses one of them does everything."""
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 16, "pause_s": 0.02},
        strategy="average:every=8",
        cluster=spread_cluster(workers=4, hosts=3),
    )
    results, events = run_on_hosts(job, tmp_path / "run", hosts=3, on_event=LostHosts(*victims, signs=tmp_path))
    told = Counter(event.kind for event in events)
    assert (told["host"], told["replaced"], told["restarted"]) == (len(victims), len(victims), 0)
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {16: 256}


def job_of(task: str, args: dict[str, Any], strategy: str, *, workers: int = 3, **wanted: Any) -> Job:
    cluster = spread_cluster(workers=workers, hosts=3)
    return Job(target=f"{TASKS}:{task}", args=args, strategy=strategy, cluster=cluster, **wanted)


def trained(folder: Path, job: Job) -> tuple[dict[str, Any], Counter[str]]:
    """On three hosts: its results, and how often what was told."""
    results, events = run_on_hosts(job, folder, hosts=3)
    return results, Counter(event.kind for event in events)


@pytest.mark.parametrize("strategy", ["average:every=8,outer=nesterov", "average:every=8,clip=norm:1"])
def test_the_same_loss_in_the_same_step_has_the_same_bits(strategy: str, tmp_path: Path) -> None:
    """A worker that dies takes its optimizer's state with it; all else follows from what was agreed on."""

    def run(name: str, deadly: int = -1) -> dict[str, Any]:
        args = {"marker": str(tmp_path / f"{name}.marker"), "deadly": deadly}
        cluster = spread_cluster(workers=3, hosts=3)
        job = Job(target=f"{DYING}:dying", args=args, strategy=strategy, cluster=cluster)
        results, told = trained(tmp_path / name, job)
        assert (told["lost"], told["replaced"], told["restarted"]) == ((1, 1, 0) if deadly >= 0 else (0, 0, 0))
        assert results["audit"]["clean"] and results["agreements"] == 10
        return results

    calm, once, again = run("calm"), run("once", DEADLY), run("again", DEADLY)
    begun = int((tmp_path / "once.marker").read_text()) // 4 + 1
    assert begun == int((tmp_path / "again.marker").read_text()) // 4 + 1
    assert begun % 8 not in (0, 1), "in the middle of a round"
    assert once["digest"] == again["digest"] != calm["digest"]
    assert once["loss"] == pytest.approx(calm["loss"], rel=0.25)


@pytest.mark.parametrize("ranks", [(1, 3), pytest.param((0, 4, 2, 5, 1), marks=pytest.mark.long)])
def test_deaths_on_all_hosts_are_outlived_until_one_does_everything(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """With evaluations and checkpoints in the middle of rounds."""
    chaos = "; ".join(f"kill worker:{rank} at step {9 + 14 * number}" for number, rank in enumerate(ranks))
    args, strategy = {"steps": 80}, "average:every=8,outer=adam"
    job = job_of("mlp", args, strategy, workers=6, chaos=chaos, checkpoint="every=5", max_failures=10)
    results, told = trained(tmp_path / "run", job)
    assert (told["fault"], told["lost"], told["restarted"]) == (len(ranks), len(ranks), 0)
    assert results["audit"]["clean"] and results["steps"] == 80
    assert told["checkpoint"] >= 80 // 8 - len(ranks)


def test_a_checkpoint_after_a_loss_is_whole(tmp_path: Path) -> None:
    """One of the middle of a round: who goes on from it sums in another order, and may lose somebody at once."""
    args, strategy = {"steps": 60, "optimizer": "adamw"}, "average:every=8,outer=nesterov"
    job = job_of("mlp", args, strategy, chaos="kill worker:2 at step 13", checkpoint="every=5,keep=20")
    results, told = trained(tmp_path / "run", job)
    assert (told["fault"], told["lost"], told["restarted"]) == (1, 1, 0)
    saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    step = max(step for step in saved if step % 8 and step < 50)
    path = find_checkpoint(str(tmp_path / "run" / "checkpoints" / folder_name(step)))

    def resumed(name: str, **changes: str) -> tuple[dict[str, Any], Counter[str]]:
        return trained(tmp_path / name, resumed_job(job, path, read_manifest(path), changes))

    found, _ = resumed("resumed")
    assert found["audit"]["clean"] and found["loss"] == pytest.approx(results["loss"], rel=1e-3)
    found, told = resumed("lost", chaos=f"kill worker:1 at step {step + 1}")
    assert (told["fault"], told["lost"], told["restarted"]) == (1, 1, 0)
    assert found["audit"]["clean"] and found["digest"] != results["digest"]


def test_hosts_may_leave_and_none_can_come(tmp_path: Path) -> None:
    job = {"args": {"signs": str(tmp_path), "epochs": 24, "pause_s": 0.2}, "progress": False}
    cluster = {"workers": 4, "threads": 1, "on": "local:2"}
    told: list[str] = []
    wanted = {"strategy": "average:every=8", "cluster": cluster, "runs": tmp_path / "runs"}
    with start(str(COUNTING), **wanted, **job) as live:
        for event in live.events():
            if event.kind == "steps" and not told:
                assert live.scale(hosts="-1")["hosts"] == 1
                told.append("asked")
            elif event.kind == "replaced":
                with pytest.raises(LaunchError, match=r"a state of its own .* but none can come"):
                    live.scale(hosts="+1")
                (tmp_path / "hurry").touch()
            if event.kind in ("host", "replaced", "host_added", "scaled"):
                told.append(event.kind)
        run = live.wait()
    assert told == ["asked", "host", "replaced"]
    assert run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {24: 256}
