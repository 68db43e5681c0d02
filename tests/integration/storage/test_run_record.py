"""What a run tells about itself: events that a crash has torn, a folder that is taken away."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from helpers.commands import SMALL_TASK, command
from shoal.launch.owner import ZygoteProcess

TRAIN = ("train", str(SMALL_TASK), "--workers", "2", "--name", "mine")
GUARD_S = 60.0


def test_a_run_with_a_torn_last_event_is_resumed(shoal, tmp_path):
    words = (*TRAIN, "--checkpoint", "every=10", "--json")
    whole = shoal(tmp_path, *words)
    assert whole.status == 0, whole.err
    events = tmp_path / "runs/mine/events.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    for _ in range(2):
        again = shoal(tmp_path, "train", "--resume", "mine@10", "--json")
        assert again.status == 0, again.err
        assert again.result["digest"] == whole.result["digest"]
        assert all(json.loads(line) for line in events.read_text().splitlines())


@pytest.mark.parametrize(
    "strategy", ["data", "ps:servers=2,sync=asp", pytest.param("ps:servers=2", marks=pytest.mark.long)]
)
def test_a_run_whose_folder_is_removed_ends_with_a_sentence(zygote: ZygoteProcess, tmp_path, strategy):
    words = (*TRAIN, "--epochs", "100000", "--strategy", strategy, "--checkpoint", "every=500")
    process = subprocess.Popen(
        command(*words),
        cwd=tmp_path,
        env={**os.environ, "SHOAL_ZYGOTE": zygote.name},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _await(lambda: '"kind": "checkpoint"' in (tmp_path / "runs/mine/events.jsonl").read_text(), process)
        while (tmp_path / "runs/mine").exists():  # a save in flight makes folders again
            shutil.rmtree(tmp_path / "runs/mine", ignore_errors=True)
        _, told = process.communicate(timeout=GUARD_S)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == 1
    assert "was removed or replaced while the run went on" in " ".join(told.split()), told
    assert "Traceback" not in told


def _await(has_come, process):
    deadline = time.monotonic() + GUARD_S
    while True:
        try:
            if has_come():
                return
        except FileNotFoundError:
            pass
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_events_that_cannot_be_written_for_a_while_end_nothing(shoal, disk, tmp_path, code):
    disk.watch(tmp_path, contains="events.jsonl", operations="write")
    disk.fail(3, 12, code=code)
    done = shoal(tmp_path, *TRAIN)
    assert disk.fired == 10
    assert done.status == 0, done.err
    assert "training goes on, and events wait in memory" in done.text
    events = [json.loads(line) for line in (tmp_path / "runs/mine/events.jsonl").read_text().splitlines()]
    assert events[0]["kind"] == "state" and events[-1]["kind"] == "memory"
    steps = [step for event in events if event["kind"] == "steps" for step, _ in event["values"]["steps"]]
    assert steps == list(range(1, 27)), "none is missing"


@pytest.mark.parametrize("name", ["events.jsonl", "result.json", "report.md", "loss.png"])
def test_what_the_disk_never_takes_is_told_by_the_exit_status(shoal, disk, tmp_path, name):
    disk.watch(tmp_path, contains=name, operations="write")
    disk.fail(1, 1 << 40)
    done = shoal(tmp_path, *TRAIN)
    assert disk.fired > 0
    assert done.status == 1
    assert "The run came to its end, but not all that it made could be kept" in done.text
    assert "the disk is full" in done.text and "Traceback" not in done.text
    assert (tmp_path / "runs/mine/model.safetensors").is_file(), "training went on"
