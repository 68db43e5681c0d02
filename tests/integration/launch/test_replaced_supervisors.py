"""Supervisors that are killed: hosts go on for a while, and another takes over what runs there."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.apart import NEEDS_NAMESPACES, ssh_to_others
from helpers.commands import command, environment
from shoal.checkpoint.wholeness import check_folder
from shoal.errors import LaunchError
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.runs import start, train
from shoal.observe.checkpoint_names import folder_name
from shoal.observe.jsonl import read_events

TASK = Path(__file__).parents[1] / "paced_tasks.py"
UNPACED = "PACED_TASKS_UNPACED"
"""As that file has it: where nobody must be in time, it need not take its time."""
GUARD_S = 120.0
STEPS = 250


class Orphans:
    """A run whose supervisor was killed while it trained, and what is left of it."""

    def __init__(self, folder: Path, zygote: ZygoteProcess | None, *words: str) -> None:
        self.folder = folder / "runs" / "left"
        named = ["--name", "left", "--arg", f"steps={STEPS}", "--threads", "1", "--checkpoint", "every=50"]
        self._supervisor = subprocess.Popen(
            command("train", f"{TASK}:paced", "-w", "2", *named, *words),
            cwd=folder,
            env=dict(os.environ) if zygote is None else environment(zygote),
            stdout=subprocess.DEVNULL,
        )
        self.agents: list[psutil.Process] = []

    def kill_after(self, step: int) -> None:
        """Kill the supervisor when it has told of this step."""
        self._wait(lambda: self.last_step() >= step)
        children = psutil.Process(self._supervisor.pid).children()
        self.agents = [child for child in children if "--join" in child.cmdline()]
        self._supervisor.kill()
        self._supervisor.wait()

    def last_step(self) -> int:
        try:
            told = [event.values["steps"] for event in read_events(self.folder) if event.kind == "steps"]
        except Exception:
            return 0
        return max((int(step) for steps in told for step, _ in steps), default=0)

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GUARD_S
        while not holds():
            assert self._supervisor.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def steps_told(self) -> list[int]:
        told = [event.values["steps"] for event in read_events(self.folder) if event.kind == "steps"]
        return [int(step) for steps in told for step, _ in steps]

    def wait_until_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.agents, timeout=GUARD_S)
        assert not alive


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


def undisturbed(folder: Path, **settings: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNPACED, "on")
        return train(
            f"{TASK}:paced", args={"steps": STEPS}, name="quiet", runs=folder / "runs", progress=False, **settings
        ).digest


@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("data", "local:2"),
        pytest.param("data", "local:1", marks=pytest.mark.long),
        pytest.param("ps:servers=2,sync=bsp", "local:2", marks=pytest.mark.long),
        pytest.param("tensor", "local:2", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_under_another_supervisor(
    strategy: str, hosts: str, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    left = Orphans(tmp_path, zygote, "--strategy", strategy, "--on", hosts)
    left.kill_after(20)
    with pytest.raises(LaunchError, match="goes on without its supervisor, and nothing of it can be changed"):
        train(resume="left", runs=tmp_path / "runs", max_steps=STEPS + 1, progress=False)
    with start(resume="left", runs=tmp_path / "runs") as live:
        run = live.wait()
    told = left.steps_told()
    assert told == sorted(set(told)) and told[-1] == STEPS
    text = (left.folder / "events.jsonl").read_text()
    assert "taking over left" in text and '"restarted"' not in text and '"lost"' not in text
    assert run.results["steps"] == STEPS and run.results["audit"]["clean"]
    left.wait_until_nothing_is_left()
    assert not (left.folder / "supervisor.journal").exists()
    quiet = undisturbed(tmp_path, strategy=strategy, cluster={"workers": 2, "threads": 1})
    assert run.digest == quiet


def test_hosts_end_when_nobody_comes(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Orphans(tmp_path, zygote, "--on", "local:2", "--grace", "0.5")
    left.kill_after(60)
    left.wait_until_nothing_is_left()
    monkeypatch.setenv(UNPACED, "on")
    run = train(resume="left", runs=tmp_path / "runs", progress=False)
    (resumed,) = [event.values["step"] for event in read_events(left.folder) if event.kind == "resumed"]
    assert resumed > 0 and run.results["steps"] == STEPS
    assert run.digest == undisturbed(tmp_path, strategy="data", cluster={"workers": 2, "threads": 1})


@NEEDS_NAMESPACES
@pytest.mark.long
def test_files_of_hosts_without_the_disk_come_to_the_successor(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker saves on a host that does not see the run folder, before and after the death."""
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh", [tmp_path / "runs"]))
    monkeypatch.delenv(ZYGOTE_VARIABLE)
    apart = ["--on", "ssh:other,first", "--interface", "127.0.0.1"]
    left = Orphans(tmp_path, None, *apart)
    left.kill_after(60)
    run = train(resume="left", runs=tmp_path / "runs", progress=False)
    assert check_folder(left.folder / "checkpoints" / folder_name(STEPS)).step == STEPS
    assert run.digest == undisturbed(tmp_path, strategy="data", cluster={"workers": 2, "threads": 1})
