"""Stopping, resuming and beginning from earlier weights, as a user does it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.commands import GUARD_S, SMALL_TASK, command, environment

BROKEN = """
sound_task = task


def fail(outputs, targets):
    raise RuntimeError("broken on purpose")


def task():
    import dataclasses

    return dataclasses.replace(sound_task(), loss=fail)
"""
"""What turns a sound task into one whose first step fails."""
GROWING = Path(__file__).parents[1] / "growing_task.py"


def result(answer):
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def trained_once(shoal_in, tmp_path_factory):
    """A folder with a run that has checkpoints of steps 10 and 20, and of its end; and what it came to."""
    folder = tmp_path_factory.mktemp("saved")
    words = ("train", str(SMALL_TASK), "--workers", "2", "--checkpoint", "every=10", "--name", "mine", "--json")
    return folder, result(shoal_in(folder, *words))


@pytest.fixture
def saved(trained_once, tmp_path):
    """That run as one's own; the digest of its model."""
    shutil.copytree(trained_once[0] / "runs", tmp_path / "runs")
    return trained_once[1]["digest"]


def test_a_run_goes_on_in_its_folder(shoal, saved, tmp_path):
    answer = shoal("train", "--resume", "mine@10")
    assert answer.returncode == 0 and "resuming mine after step 10" in answer.stdout, answer.stderr
    assert "checkpoint of step 20: " in answer.stdout
    assert f"  {saved}\n" in answer.stdout, "the digest of the unbroken run"
    events = [json.loads(line) for line in (tmp_path / "runs/mine/events.jsonl").read_text().splitlines()]
    told = [event["values"] for event in events if event["kind"] == "checkpoint"]
    assert [values["step"] for values in told] == [10, 20, 26, 20, 26]
    assert all(values["nbytes"] and values["seconds"] >= 0 and values["stall"] >= 0 for values in told)
    assert "| checkpoints | 5, training stood still" in (tmp_path / "runs/mine/report.md").read_text()


def test_what_is_given_now_counts_and_the_rest_stays(shoal, saved, tmp_path):
    words = (
        "--resume",
        "mine",
        "--epochs",
        "3",
        "--max-steps",
        "30",
        "--workers",
        "1",
        "--strategy",
        "ps:servers=2",
    )
    found = result(shoal("train", *words, "--checkpoint", "every=4,keep=9", "--json"))
    assert (found["steps"], found["audit"]["clean"]) == (30, True)
    assert found["audit"]["cells"] == 30 * 2 == found["audit"]["shards"][0]["once"], "those of the first run, too"
    job = json.loads((tmp_path / "runs/mine/job.json").read_text())
    assert (job["strategy"], job["cluster"]["workers"], job["slots"]) == ("ps:servers=2", 1, 2)
    assert job["target"] == str(SMALL_TASK) and job["checkpoint"] == "every=4,keep=9"


@pytest.mark.parametrize("strategy", ["data", "ps", pytest.param("ps:sync=asp", marks=pytest.mark.long)])
def test_a_run_that_failed_after_its_last_step_gets_its_model(shoal, saved, tmp_path, strategy):
    (tmp_path / "runs/mine/model.safetensors").unlink()
    found = result(shoal("train", "--resume", "mine", "--strategy", strategy, "--json"))
    assert (found["steps"], found["digest"]) == (26, saved)
    assert found["audit"]["clean"] and (tmp_path / "runs/mine/model.safetensors").is_file()


def test_a_torn_checkpoint_is_passed_over(shoal, saved, tmp_path):
    cut, flipped = (tmp_path / f"runs/mine/checkpoints/step-0000000{step}/model.bin" for step in (26, 20))
    cut.write_bytes(cut.read_bytes()[:100])
    data = bytearray(flipped.read_bytes())
    data[5] ^= 4
    flipped.write_bytes(data)
    answer = shoal("train", "--resume", "mine")
    assert answer.returncode == 0, answer.stderr
    assert "warning: Checkpoint" in answer.stdout and "step-000000026 is torn: model.bin" in answer.stdout
    assert "step-000000020 is torn: model.bin: chunk 1 of 1 does not have its checksum" in answer.stdout
    assert "resuming mine after step 10" in answer.stdout and f"  {saved}\n" in answer.stdout
    assert shoal("checkpoint", "verify", "mine").returncode == 0, "they were saved anew"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--resume", "mine@7"], "no checkpoint of step 7; there are those of steps 10, 20, 26"),
        (["--resume", "mine", str(SMALL_TASK)], "leave target, args, name, weights_from and skip_seen out"),
        ([], "name a task, path.py:factory, or a run with"),
        (["--resume", "mine"], "so none is left; ask for more with --epochs"),
    ],
)
def test_what_cannot_be_resumed_says_why(shoal, saved, words, text):
    answer = shoal("train", *words)
    assert answer.returncode == 2 and text in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--epochs", "1"], "the run has 13 steps, so none is left"),
        (["--batch-size", "32"], "a batch size of 16, but this run has 32"),
    ],
)
def test_what_was_refused_leaves_the_run_as_it_was(shoal, saved, tmp_path, words, text):
    shutil.rmtree(tmp_path / "runs/mine/checkpoints/step-000000026")
    kept = [tmp_path / "runs/mine" / name for name in ("job.json", "result.json")]
    before = [path.read_bytes() for path in kept]
    refused = shoal("train", "--resume", "mine", *words)
    assert refused.returncode in (1, 2) and text in " ".join(refused.stderr.split()), refused.stderr
    assert [path.read_bytes() for path in kept] == before
    assert result(shoal("train", "--resume", "mine", "--json"))["digest"] == saved


def test_what_fails_in_its_first_step_leaves_the_run_as_it_was(shoal, saved, tmp_path):
    folder, own = tmp_path / "runs/mine", tmp_path / "own.py"
    own.write_text(SMALL_TASK.read_text() + BROKEN)
    sound = (folder / "job.json").read_text()
    broken = sound.replace(str(SMALL_TASK), str(own))
    (folder / "job.json").write_text(broken)
    failed = shoal("train", "--resume", "mine@20", "--on-failure", "stop", "--workers", "1")
    assert failed.returncode == 1 and "broken on purpose" in failed.stderr
    assert (folder / "job.json").read_text() == broken and (folder / "result.json").exists()
    (folder / "job.json").write_text(sound)
    assert result(shoal("train", "--resume", "mine@20", "--json"))["digest"] == saved


def test_an_interrupted_run_says_how_to_go_on(zygote, tmp_path):
    words = ["train", str(SMALL_TASK), "--workers", "2", "--epochs", "100000", "--checkpoint", "every=1h"]
    process = subprocess.Popen(
        command(*words, "--name", "long"),
        cwd=tmp_path,
        env=environment(zygote),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = tmp_path / "runs/long/events.jsonl"
    deadline = time.monotonic() + GUARD_S
    while not (events.is_file() and '"kind": "steps"' in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=GUARD_S)
    done = json.loads((tmp_path / "runs/long/result.json").read_text())["steps"]
    assert process.returncode == 130
    assert f"Go on after step {done:,} with: shoal train --resume long" in " ".join(told.split())


def test_a_failed_run_says_how_to_go_on(shoal):
    words = ("train", str(SMALL_TASK), "--workers", "2", "--epochs", "100000", "--checkpoint", "every=40")
    failed = shoal(*words, "--name", "mine", "--on-failure", "stop", "--chaos", "raise worker:1 at step 100")
    assert failed.returncode == 1
    said = re.search(r"Go on after step ([\d,]+) with: shoal train --resume mine", " ".join(failed.stderr.split()))
    assert said and int(said[1].replace(",", "")) >= 80, failed.stderr


def test_beginning_from_old_weights(shoal, tmp_path):
    words = ("train", str(GROWING), "--workers", "2", "--arg")
    result(shoal(*words, "count=96", "--checkpoint", "every=100", "--name", "first", "--json"))
    answer = shoal(
        *words, "count=120", "--from", "first", "--skip-seen", "--skip-loss-below", "9", "--name", "second"
    )
    assert answer.returncode == 0, answer.stderr
    report = (tmp_path / "runs/second/report.md").read_text()
    for row, value in (
        ("seen before", "96 samples were left out"),
        ("learnt already", "6 parts of batches with 24 samples were skipped"),
    ):
        assert re.search(rf"  {row} +{value}", answer.stdout) and f"| {row} | {value} |" in report
    repeated = f"--from {tmp_path}/runs/first/checkpoints/step-000000012 --skip-loss-below 9.0 --skip-seen"
    assert repeated in report
