"""Runs that go on while their starter does something else: in any thread, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.commands import GUARD_S, SMALL_TASK, environment
from shoal.errors import Interrupted, LaunchError, SpecError, WorkerFailed
from shoal.launch.live import LiveRun
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event, read_events
from shoal.observe.happenings import Evaluated, Scaled, StepsTaken, Stopped
from shoal.spec import Cluster, Job

ENDLESS = Path(__file__).parents[1] / "paced_tasks.py"

Start = Callable[..., LiveRun]


@pytest.fixture
def start(tmp_path: Path, zygote: ZygoteProcess) -> Start:
    """Starts a run that does not end by itself, unless another task is named."""

    def begin(target: Any = f"{ENDLESS}:paced", **settings: Any) -> LiveRun:
        usual: dict[str, Any] = {"runs": tmp_path, "name": "mine", "zygote": zygote}
        if not isinstance(target, Job):
            usual["cluster"] = {"workers": 2, "threads": 1}
        if target == f"{ENDLESS}:paced":
            usual["args"] = {"steps": 100_000}
        return shoal.start(target, **{**usual, **settings})

    return begin


def await_steps(run: LiveRun) -> None:
    next(event for event in run.events() if isinstance(event.what, StepsTaken))


def left_behind(run: LiveRun) -> set[str]:
    """What is there only while a run goes on."""
    return {name for name in ("lock", "control") if (run.folder / name).exists()}


def follow(start: Start) -> tuple[shoal.Run, list[Event], dict[str, Any]]:
    """Follow a run, let it shrink, and stop it when it has."""
    assert threading.current_thread() is not threading.main_thread()
    events: list[Event] = []
    answer: dict[str, Any] = {}
    with start() as run:
        assert run.scale()["workers"] == 2
        for event in run.events():
            events.append(event)
            if isinstance(event.what, StepsTaken) and not answer:
                answer = run.scale(workers=1)
            elif isinstance(event.what, Scaled):
                run.stop()
        found = run.wait(GUARD_S)
    assert run.is_over and not left_behind(run)
    return found, events, answer


def test_a_run_is_followed_scaled_and_stopped_from_another_thread(start: Start) -> None:
    with ThreadPoolExecutor(1) as pool:
        found, events, answer = pool.submit(follow, start).result(GUARD_S)
    assert answer["workers"] == 1
    (scaled,) = [event.what for event in events if isinstance(event.what, Scaled)]
    assert (scaled.before, scaled.workers) == (2, 1)
    assert found.results["reason"] == "stopped" and found.digest
    assert (found.folder / "model.safetensors").is_file() and (found.folder / "report.md").is_file()
    assert isinstance(events[-1].what, Stopped) and events[-1].what.reason == "interrupted"
    kept = [event for event in read_events(found.folder) if event.kind != "memory"]
    assert [event for event in events if event.kind != "beat"] == kept, "the file tells the same"


def test_two_runs_at_once(start: Start) -> None:
    def train(name: str) -> shoal.Run:
        return start(str(SMALL_TASK), name=name).wait(GUARD_S)

    with ThreadPoolExecutor(2) as pool:
        first, second = (one.result(GUARD_S) for one in [pool.submit(train, name) for name in ("one", "two")])
    assert first.folder != second.folder and first.digest == second.digest
    assert first.results["audit"]["clean"] and first.results["results"] == second.results["results"]


def test_a_whole_job_can_be_started(start: Start) -> None:
    job = Job(target=f"{SMALL_TASK}:task", cluster=Cluster(workers=1, threads=1), overrides={"epochs": 1})
    with pytest.raises(SpecError, match="A Job says itself what precision would say"):
        start(job, precision="bf16")
    run = start(job)
    evaluations = [event.what for event in run.events() if isinstance(event.what, Evaluated)]
    assert run.wait(GUARD_S).results["results"] == evaluations[-1].results


def test_what_cannot_be_is_refused_at_once(start: Start) -> None:
    with pytest.raises(SpecError, match="There is no file"):
        start("nowhere.py")
    with pytest.raises(TypeError, match="multiple values"):
        shoal.start("nowhere.py", target="somewhere.py")
    with start() as run:
        with pytest.raises(LaunchError, match="is going on in"):
            start(overwrite=True)
        with pytest.raises(SpecError, match="workers must be a whole number of at least 1"):
            run.scale(workers=0)
        with pytest.raises(LaunchError, match="has no servers"):
            run.scale(servers=2)
        with pytest.raises(TimeoutError, match="goes on"):
            run.wait(0.01)
    with pytest.raises(SpecError, match="is not running"):
        run.scale(workers=1)


def test_what_goes_wrong_reaches_the_one_who_waits(start: Start) -> None:
    run = start(str(SMALL_TASK), args={"width": "wide"})
    assert [event.kind for event in run.events()][-2:] == ["failed", "stopped"]
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="failed: TypeError"):
            run.wait(GUARD_S)
    with pytest.raises(WorkerFailed), start(str(SMALL_TASK), name="other", args={"width": "wide"}) as other:
        list(other.events())
    with start(str(SMALL_TASK), name="third", args={"width": "wide"}) as third, pytest.raises(WorkerFailed):
        third.wait(GUARD_S)
    assert not left_behind(third), "and whoever has heard of it is not told again"


def test_leaving_the_block_stops_the_run(start: Start) -> None:
    with start() as run:
        await_steps(run)
    assert run.is_over and not left_behind(run)
    assert run.wait().results["reason"] == "stopped"


def test_an_error_in_the_block_is_the_one_that_is_told(start: Start) -> None:
    with pytest.raises(ZeroDivisionError), start() as run:
        await_steps(run)
        raise ZeroDivisionError
    assert run.is_over and (run.folder / "model.safetensors").is_file()


def test_a_run_can_be_ended_at_once(start: Start) -> None:
    run = start()
    await_steps(run)
    run.stop(at_once=True)
    with pytest.raises(Interrupted, match=r"ended at once.*No model was saved"):
        run.wait(GUARD_S)
    assert not left_behind(run)


SCRIPT = """
import sys, shoal
run = shoal.start(sys.argv[1], args={"steps": 100_000}, workers=2, runs=sys.argv[2], name="mine")
next(event for event in run.events() if event.kind == "steps")
"""


def test_a_run_that_nobody_waits_for_ends_with_its_process(tmp_path: Path, zygote: ZygoteProcess) -> None:
    words = [sys.executable, "-c", SCRIPT, f"{ENDLESS}:paced", str(tmp_path)]
    done = subprocess.run(words, env=environment(zygote), capture_output=True, text=True, timeout=GUARD_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_events(tmp_path / "mine")[-1].kind in ("stopped", "memory")
    assert not {"lock", "control"} & set(os.listdir(tmp_path / "mine"))
