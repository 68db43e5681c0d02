"""Faults that a user asks for come when they were asked for, and change nothing but the time it takes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job
from shoal.spec.chaos import parse_chaos

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
STEPS = 300
SERVED = "ps:servers=2,shards=4"


def make_job(
    folder: Path, *, steps: int = STEPS, strategy: str = "data:via=arena", spares: int = 0, chaos: str = ""
) -> Job:
    folder.mkdir()
    return Job(
        target=f"{TASKS}:mlp",
        args={"width": 200, "optimizer": "adamw"},
        strategy=strategy,
        cluster=Cluster(workers=2, threads=1, spares=spares),
        overrides={"evaluate_every": 10_000, "max_steps": steps, "epochs": steps},
        run_dir=str(folder),
        chaos=chaos,
        max_failures=1000,
    )


def run(job: Job, zygote: ZygoteProcess) -> tuple[dict[str, Any], list[Event]]:
    events: list[Event] = []
    return Supervisor(job, events.append, LocalEngine(zygote)).run(), events


def told(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.values for event in events if event.kind == kind]


def struck(events: list[Event]) -> list[str]:
    """The faults that came to pass, as they are written."""
    values = told(events, "fault")
    return [str(replace(parse_chaos("slow worker:0 x2").faults[0], **fault)) for fault in values]


@pytest.fixture(scope="module")
def calm_digest(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> str:
    """What comes out where nothing goes wrong."""
    results, _ = run(make_job(tmp_path_factory.mktemp("calm") / "run"), zygote)
    return results["digest"]


@pytest.mark.parametrize(
    ("chaos", "spares", "lost"),
    [
        ("kill worker:1 at step 50; kill worker:0 at step 150", 1, 2),
        ("hang worker:0 at step 80 for 0.3s", 0, 0),
        ("slow worker:1 x4 at step 20 for 0.3s", 0, 0),
        ("raise worker:0 at step 30; raise worker:1 at step 130", 1, 2),
    ],
)
def test_a_fault_comes_at_its_step_and_changes_no_bit(
    tmp_path: Path, zygote: ZygoteProcess, calm_digest: str, chaos: str, spares: int, lost: int
) -> None:
    results, events = run(make_job(tmp_path / "run", spares=spares, chaos=chaos), zygote)
    assert struck(events) == chaos.split("; ")
    assert len(told(events, "lost")) == len(told(events, "replaced")) == lost
    assert results["steps"] == STEPS and results["digest"] == calm_digest
    assert not [told for told in told(events, "warning") if "never fired" in told["text"]]


def test_a_hang_without_end_is_found_and_replaced(tmp_path: Path, zygote: ZygoteProcess, calm_digest: str) -> None:
    chaos = "hang worker:1 at step 100"
    results, events = run(make_job(tmp_path / "run", spares=1, chaos=chaos), zygote)
    assert struck(events) == [chaos]
    (lost,) = told(events, "lost")
    assert lost["rank"] == 1 and "hung" in lost["reason"]
    assert results["digest"] == calm_digest


def test_what_raises_in_every_process_stops_the_run(tmp_path: Path, zygote: ZygoteProcess) -> None:
    job = make_job(tmp_path / "run", spares=1, chaos="raise worker:1 at step 30 always")
    events: list[Event] = []
    with pytest.raises(WorkerFailed, match=r"Two processes failed .*slot 1 of step 30"):
        Supervisor(job, events.append, LocalEngine(zygote)).run()
    assert struck(events) == [job.chaos]
    assert told(events, "lost"), "the first to raise must be replaced: it might have been its own fault"


def test_members_of_a_served_job_fail_as_asked(tmp_path: Path, zygote: ZygoteProcess, calm_digest: str) -> None:
    chaos = "kill server:0 at step 40; kill worker:1 at step 90; kill coordinator at step 140"
    results, events = run(make_job(tmp_path / "run", strategy=SERVED, chaos=chaos), zygote)
    assert struck(events) == chaos.split("; ")
    assert [(lost["role"], lost["rank"]) for lost in told(events, "lost")] == [
        ("server", 0),
        ("worker", 1),
        ("coordinator", 0),
    ]
    assert results["digest"] == calm_digest and results["audit"]["clean"]


def test_what_never_fired_is_told(tmp_path: Path, zygote: ZygoteProcess) -> None:
    chaos = f"slow worker:1 x2 at step 5 for 0.1s; kill worker:0 at step {STEPS + 9}; raise worker:1 at step 7777"
    results, events = run(make_job(tmp_path / "run", chaos=chaos), zygote)
    assert results["steps"] == STEPS
    assert [warning["text"] for warning in told(events, "warning")] == [
        f"2 of 3 faults never fired: kill worker:0 at step {STEPS + 9}; raise worker:1 at step 7777"
    ]


def test_random_faults_come_again_with_their_seed(tmp_path: Path, zygote: ZygoteProcess) -> None:
    enough = 3
    lists = []
    for name in ("first", "second"):
        events: list[Event] = []

        def listen(event: Event, events: list[Event] = events) -> None:
            events.append(event)
            if event.kind == "fault" and len(told(events, "fault")) == enough:
                os.kill(os.getpid(), signal.SIGINT)  # the run may end

        chaos = "random:every=0.4s,kinds=kill+raise,seed=5"
        job = make_job(tmp_path / name, steps=100_000, spares=1, chaos=chaos)
        with pytest.raises(Interrupted):
            Supervisor(job, listen, LocalEngine(zygote)).run()
        lists.append([(fault["kind"], fault["rank"]) for fault in told(events, "fault")][:enough])
    assert lists[0] == lists[1] and len(set(lists[0])) > 1


def test_the_terminal_and_the_report_show_faults(tmp_path: Path, zygote: ZygoteProcess) -> None:
    with (tmp_path / "screen.txt").open("w+") as screen:
        done = train(
            f"{TASKS}:mlp",
            workers=2,
            chaos="slow worker:1 x2 at step 5 for 0.1s",
            runs=tmp_path,
            output=screen,
            zygote=zygote,
        )
        screen.seek(0)
        shown = screen.read()
    line = "fault: slowed down worker 1 at step 5 by a factor of 2 for 0.1 s"
    assert line in shown
    report = (done.folder / "report.md").read_text()
    assert line in report and "| faults | 1 slow |" in report
    assert "--chaos 'slow worker:1 x2 at step 5 for 0.1s'" in report


def test_whoever_is_first_next_knows_what_was_saved(tmp_path: Path, zygote: ZygoteProcess) -> None:
    job = make_job(tmp_path / "run", steps=70, spares=1, chaos="kill worker:0 at step 45")
    _, events = run(replace(job, checkpoint="every=30,keep=9"), zygote)
    assert struck(events) == ["kill worker:0 at step 45"]
    first, *later = [saved["step"] for saved in told(events, "checkpoint")]
    # Killed while it wrote that of step 30, it leaves none of it, and one is due at once; never both. On a slow
    # machine that may be the next one that is due by itself.
    assert first == 30 or first >= 45
    assert later == [step for step in (60, 70) if step > first]
