"""A run folder belongs to one supervisor: others are refused, and told who it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from helpers.commands import GUARD_S, SMALL_TASK, command, environment
from shoal.observe.checkpoint_names import step_folders, step_of


@pytest.fixture(params=["data", pytest.param("ps:servers=2,sync=asp", marks=pytest.mark.long)])
def going_on(request, zygote, tmp_path):
    """A run named `mine` that has a checkpoint and goes on until it is killed."""
    words = ["train", str(SMALL_TASK), "--workers", "2", "--epochs", "100000", "--strategy", request.param]
    process = subprocess.Popen(
        command(*words, "--checkpoint", "every=20", "--name", "mine"),
        cwd=tmp_path,
        env=environment(zygote),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    checkpoints = tmp_path / "runs/mine/checkpoints"
    deadline = time.monotonic() + GUARD_S
    while not list(checkpoints.glob("step-*/manifest.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_a_run_that_goes_on_is_left_alone_and_a_killed_one_is_resumed_at_once(going_on, shoal, tmp_path):
    folder = tmp_path / "runs/mine"
    job, began = (folder / "job.json").read_bytes(), (folder / "events.jsonl").stat().st_ino
    for words in (
        ["--resume", "mine", "--max-steps", "9"],
        ["--resume", "mine@20"],
        [str(SMALL_TASK), "--name", "mine", "--overwrite"],
    ):
        refused = shoal("train", *words)
        said = " ".join(refused.stderr.split())
        assert refused.returncode == 1 and f"process {going_on.pid} on" in said, said
        assert "Run 'mine' is going on" in said and said.count("error:") == 1 and "Traceback" not in said
    assert (folder / "job.json").read_bytes() == job and (folder / "events.jsonl").stat().st_ino == began
    assert going_on.poll() is None, "it goes on"
    os.kill(going_on.pid, signal.SIGKILL)
    going_on.wait()
    newest = step_of(step_folders(folder / "checkpoints")[-1])
    resumed = shoal("train", "--resume", "mine", "--max-steps", str(newest + 30), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["audit"]["clean"]
    assert not (folder / "lock").exists()
