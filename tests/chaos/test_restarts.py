"""Where nobody can take a dead worker's place, the run goes on by itself from its newest checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from remains import processes_in

from shoal.checkpoint.listing import read_manifest
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import resumed_job
from shoal.launch.runs import Run, train
from shoal.launch.supervisor import Supervisor
from shoal.observe import RunFolder, RunSummary, read_events
from shoal.observe.report import counted_losses

TASKS = Path(__file__).parents[1] / "equivalence" / "resumed_tasks.py"
FAULTY = Path(__file__).with_name("faulty_tasks.py")
BAD = 57
STEPS, EVERY = 48, 8
KILL = "kill worker:1 at step 20"
WAYS = {
    "ring": (2, "data:via=ring"),
    "sharded": (2, "sharded"),
    "average": (2, "average:every=4,outer=nesterov,via=sockets"),
    "sharded groups": (4, "average:every=6,outer=nesterov,inside=sharded,groups=2"),
}
MORE_WAYS = {
    "backend": (2, "data:via=backend"),
    "relay": (2, "data:partition=relay"),
    "pipeline": (2, "pipeline"),
    "layer": (2, "layer:decoupled=on"),
    "alone": (1, "data"),
    "tree": (3, "data:via=tree"),
    "central": (3, "data:via=central"),
    "allgather": (2, "data:via=allgather"),
    "tensor": (2, "tensor"),
    "mesh": (4, "mesh:data=2,pipeline=2,microbatches=2"),
    "phases": (2, "layer:phases=2"),
    "streamed": (2, "average:every=6,parts=3,delay=3,outer=nesterov"),
    "groups": (3, "average:every=4,inside=data,groups=2"),
    "staged groups": (4, "average:every=6,outer=adam,inside=pipeline:microbatches:2,groups=2"),
    "compressed groups": (4, "average:every=3,inside=tensor,groups=2,via=sockets,compress=int8"),
    "groups that are grids": (8, "average:every=6,inside=mesh:shard:2,tensor:2"),
    "members": (2, "average:every=4,combine=ensemble,via=sockets"),
    "placed": (2, "layer:place=0@0+1@0+2@1+3@1+4@1"),
}


class Watched(StringIO):
    """Where a run writes its lines; does something when one of them comes."""

    def __init__(self, words: str = "", act: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._words = words
        self._act = act

    def write(self, text: str) -> int:
        if self._words and self._words in text:
            self._words = ""
            self._act()
        return super().write(text)


@dataclass
class Runner:
    """Trains in folders of its own; what a run told is read from there."""

    root: Path
    zygote: ZygoteProcess

    def __call__(self, name: str, strategy: str = "data:via=ring", workers: int = 2, **asked: Any) -> Run:
        wanted = {"args": {"steps": STEPS, "dropout": 0.0}, "output": StringIO(), **asked}
        if "resume" not in wanted:
            wanted |= {"name": name, "target": f"{TASKS}:everything", "strategy": strategy, **asked}
            wanted["cluster"] = {"workers": workers, "threads": 1}
        else:
            del wanted["args"]
        return train(**wanted, runs=self.root, progress=False, zygote=self.zygote)

    def told(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event.values for event in read_events(self.root / name) if event.kind == kind]


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Runner:
    return Runner(tmp_path, zygote)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> Run:
    """A ring of two that nothing happens to, with all its checkpoints."""
    return Runner(tmp_path_factory.mktemp("calm"), zygote)("ring", checkpoint=f"every={EVERY},keep=99")


def told_by(found: Run) -> tuple[RunSummary, list[tuple[int, float]]]:
    """What the events of a run add up to, and the losses that count."""
    events, summary = read_events(found.folder), RunSummary()
    for event in events:
        summary.add(event)
    return summary, counted_losses(events)


def assert_as_if_undisturbed(found: Run, calm: Run) -> None:
    """The same model, losses, evaluations and books; of steps that were undone nothing is counted."""
    assert found.digest == calm.digest
    assert found.results["results"] == calm.results["results"]
    assert found.results["audit"] == calm.results["audit"] and found.results["audit"]["clean"]
    (summary, losses), (expected, expected_losses) = told_by(found), told_by(calm)
    assert losses == expected_losses and len(losses) == STEPS
    assert summary.evaluations == expected.evaluations
    assert (summary.step, summary.samples) == (expected.step, expected.samples)
    assert not processes_in(found.folder)


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.long) for way in MORE_WAYS)])
def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_no_bit(run: Runner, calm: Run, way: str) -> None:
    workers, strategy = (WAYS | MORE_WAYS)[way]
    calm = calm if way == "ring" else run("calm", strategy, workers)
    kill = KILL if workers > 1 else KILL.replace(":1", ":0")
    found = run("killed", strategy, workers, checkpoint=f"every={EVERY}", chaos=kill)
    (fault,), (restarted,) = run.told("killed", "fault"), run.told("killed", "restarted")
    assert fault["kind"] == "kill"
    assert restarted["step"] % EVERY == 0 and EVERY <= restarted["step"] < STEPS
    assert "was killed from outside (SIGKILL)" in restarted["reason"] and "--resume" not in restarted["reason"]
    assert found.results["restarts"] == 1
    assert_as_if_undisturbed(found, calm)


def test_before_the_first_checkpoint_it_begins_from_the_start(run: Runner, calm: Run) -> None:
    found = run("killed", checkpoint="every=1h", chaos="kill worker:0 at step 5")
    (restarted,) = run.told("killed", "restarted")
    assert (restarted["step"], restarted["samples"]) == (0, 0)
    assert_as_if_undisturbed(found, calm)


@pytest.mark.parametrize(
    ("strategy", "chaos"),
    [
        ("data:via=arena", KILL),
        ("ps:sync=asp", KILL),
        pytest.param("ps:servers=2", KILL, marks=pytest.mark.long),
        pytest.param("ps:servers=2", "kill server:0 at step 20", marks=pytest.mark.long),
        pytest.param("ps:servers=2", "kill coordinator at step 20", marks=pytest.mark.long),
    ],
)
def test_who_asks_for_it_gets_it_where_workers_could_be_replaced(run: Runner, strategy: str, chaos: str) -> None:
    calm = run("calm", strategy)
    found = run("killed", strategy, chaos=chaos, checkpoint=f"every={EVERY}", on_failure="restart")
    assert len(run.told("killed", "restarted")) == len(run.told("killed", "fault")) == 1
    assert not run.told("killed", "replaced")
    if "asp" not in strategy:
        assert found.digest == calm.digest
    audits = found.results["audit"], calm.results["audit"]
    assert audits[0]["clean"] and len({audit["samples"] for audit in audits}) == 1, "all that led to the model"


def test_every_fault_strikes_once_however_often_all_begin_again(run: Runner, calm: Run) -> None:
    chaos = "kill worker:1 at step 12; kill worker:0 at step 21; raise worker:1 at step 33"
    found = run("killed", checkpoint=f"every={EVERY}", chaos=chaos)
    assert len(run.told("killed", "fault")) == 3
    # On a busy machine two may strike in one attempt.
    assert found.results["restarts"] == len(run.told("killed", "restarted")) in (1, 2, 3)
    assert "never fired" not in str(run.told("killed", "warning"))
    assert_as_if_undisturbed(found, calm)


@pytest.mark.long
def test_a_hung_worker_is_ended_and_all_begin_again(run: Runner, calm: Run) -> None:
    found = run("hung", checkpoint=f"every={EVERY}", chaos="hang worker:1 at step 20")
    (hung,), (restarted,) = run.told("hung", "hung"), run.told("hung", "restarted")
    assert hung["rank"] == 1 and "hung and was ended" in restarted["reason"]
    assert_as_if_undisturbed(found, calm)


def test_a_torn_checkpoint_is_passed_over(run: Runner, calm: Run) -> None:
    def tear() -> None:
        data = run.root / "torn" / "checkpoints" / f"step-{2 * EVERY:09}" / "model.bin"
        data.write_bytes(data.read_bytes()[:100])

    output = Watched(f"checkpoint of step {2 * EVERY}:", tear)
    found = run("torn", checkpoint=f"every={EVERY}", chaos=KILL, output=output)
    (restarted,) = run.told("torn", "restarted")
    if restarted["step"] < 2 * EVERY:  # else a newer one was written before the kill came
        assert "is torn: model.bin" in output.getvalue() and restarted["step"] == EVERY
    assert_as_if_undisturbed(found, calm)


@pytest.mark.parametrize(
    "way", ["ring", *(pytest.param(way, marks=pytest.mark.long) for way in WAYS | MORE_WAYS if way != "ring")]
)
def test_who_dies_after_the_last_step_was_saved_has_only_the_model_to_save(
    run: Runner, calm: Run, way: str
) -> None:
    workers, strategy = (WAYS | MORE_WAYS)[way]
    if way != "ring":
        calm = run("calm", strategy, workers, checkpoint=f"every={EVERY}")
    path = calm.folder / "checkpoints" / f"step-{STEPS:09}"
    job = resumed_job(RunFolder(calm.folder).read_job(), path, read_manifest(path), {})
    # As the attempt after one that died.
    job = replace(job, run_dir=str(run.root / "again"), options={**job.options, "failures": 1})
    results = Supervisor(job, lambda event: None, LocalEngine(run.zygote)).run()
    assert results["digest"] == calm.digest and results["audit"] == calm.results["audit"]
    assert (results["steps"], results["results"]) == (STEPS, calm.results["results"])


def test_checkpoints_of_a_past_that_was_given_up_are_left_alone(run: Runner, calm: Run) -> None:
    shutil.copytree(calm.folder, run.root / "again")
    chaos = f"kill worker:1 at step {EVERY + 2}"
    found = run("again", resume=f"again@{EVERY}", chaos=chaos, checkpoint="every=1h,keep=99")
    (restarted,) = run.told("again", "restarted")
    assert restarted["step"] == EVERY, "not at the end of the run before"
    assert_as_if_undisturbed(found, calm)


def test_the_same_error_at_the_same_sample_ends_the_run(run: Runner) -> None:
    with pytest.raises(WorkerFailed, match=rf"Two processes failed .* is number {BAD}\. "):
        run("poisoned", target=f"{FAULTY}:task", args={"kind": "always"}, checkpoint="every=2")
    assert len(run.told("poisoned", "raised")) >= 2 and len(run.told("poisoned", "restarted")) == 1
    (failed,) = run.told("poisoned", "failed")
    assert f"is number {BAD}." in failed["message"] and "ValueError" in failed["traceback"]


def test_it_is_enough_when_no_restart_helps(run: Runner) -> None:
    asked = {"target": f"{FAULTY}:task", "args": {"kind": "deadly"}, "on_failure": "restart", "max_failures": 2}
    with pytest.raises(WorkerFailed, match=r"2 restarts after step 0 without .* max_failures=2") as failure:
        run("killed", **asked)
    assert failure.value.exit_code == 128 + signal.SIGKILL
    assert len(run.told("killed", "restarted")) == 2


def test_what_fails_before_training_is_not_tried_again(run: Runner) -> None:
    with pytest.raises(WorkerFailed, match="unexpected keyword argument"):
        run("wrong", args={"no_such": 1}, checkpoint="every=2")
    assert not run.told("wrong", "restarted")


def test_ctrl_c_while_all_begin_again_stops_and_the_run_can_be_resumed(run: Runner, calm: Run) -> None:
    output = Watched("all begin again", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match=r"stopped on request.* Go on after step \d+ with: shoal train --resume"):
        run("killed", checkpoint=f"every={EVERY}", chaos=KILL, output=output)
    assert not processes_in(run.root / "killed")
    found = run("killed", resume="killed")
    assert "restarts" not in found.results
    assert_as_if_undisturbed(found, calm)


def test_without_checkpoints_it_says_what_would_have_helped(run: Runner) -> None:
    words = (
        r"With strategy=data:via=ring nobody can take its place; with --checkpoint every=200 the run goes on by"
    )
    with pytest.raises(WorkerFailed, match=words):
        run("killed", chaos=KILL)
    assert not run.told("killed", "restarted")


def test_whoever_said_stop_is_not_restarted(run: Runner) -> None:
    with pytest.raises(WorkerFailed, match=r"SIGKILL.* Go on after step \d+ with: shoal train --resume"):
        run("killed", chaos=KILL, checkpoint=f"every={EVERY}", on_failure="stop")
    assert not run.told("killed", "restarted")


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("step", [2, 10, 30])
def test_a_worker_killed_in_any_turn_of_layers_costs_no_bit(run: Runner, step: int, worker: int) -> None:
    strategy = "layer:phases=3,every=4"
    found = run("killed", strategy, checkpoint="every=1", chaos=f"kill worker:{worker} at step {step}")
    assert len(run.told("killed", "fault")) == len(run.told("killed", "restarted")) == 1
    assert_as_if_undisturbed(found, run("calm", strategy))
