"""`shoal train` from end to end: what it prints, what it leaves, how it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.commands import GUARD_S, SMALL_TASK, command, environment


def test_a_run_leaves_a_folder(trained):
    names = {path.name for path in trained.iterdir()}
    assert names >= {"job.json", "result.json", "events.jsonl", "report.md", "model.safetensors", "logs"}
    job = json.loads((trained / "job.json").read_text())
    assert job["target"] == str(SMALL_TASK), "the run remembers where its task is"
    assert "--epochs 1" in (trained / "report.md").read_text()


def test_plain_output_and_final_table(shoal):
    answer = shoal("train", str(SMALL_TASK), "--max-steps", "12", "--arg", "width=5", "--name", "mine")
    assert answer.returncode == 0 and answer.stderr == ""
    assert "1 worker on 1 host" in answer.stdout
    for row in ("test loss", "accuracy", "steps", "model      runs/mine/model.safetensors"):
        assert f"  {row}" in answer.stdout
    again = shoal("train", str(SMALL_TASK), "--name", "mine")
    assert again.returncode == 2 and "overwrite" in again.stderr


def test_a_warning_in_the_workers_is_shown_once(shoal, tmp_path):
    task = tmp_path / "warned.py"
    task.write_text(f"{SMALL_TASK.read_text()}\n\nimport warnings\n\nwarnings.warn('the data is odd')\n")
    answer = shoal("train", str(task), "--workers", "2", "--max-steps", "2", "--name", "mine")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("warning: UserWarning: the data is odd (") == 1, answer.stdout
    logs = list((tmp_path / "runs/mine/logs").glob("rank-*.log"))
    assert len(logs) == 2 and all("the data is odd" in log.read_text() for log in logs)


def test_json_is_all_there_is_on_standard_output(shoal, tmp_path):
    words = ["train", str(SMALL_TASK), "--workers", "2", "--slots", "4", "--max-steps", "5", "--batch-size", "32"]
    answer = shoal(*words, "--seed", "3", "--evaluate-every", "2", "--json", "--name", "mine", "--runs", "kept")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["run"] == str(tmp_path / "kept" / "mine")
    assert (found["steps"], found["samples"], found["reason"]) == (5, 160, "finished")
    assert set(found["results"]) == {"loss", "accuracy"} and len(found["digest"]) == 32
    assert "2 workers" in answer.stderr


def test_torch_is_not_imported_in_the_command(zygote, tmp_path):
    code = f"""
import sys
from shoal.cli import main
sys.argv = ["shoal", "train", {str(SMALL_TASK)!r}, "--max-steps", "2", "--plain"]
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(zygote),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=True,
    )
    assert answer.stdout.splitlines()[-1] == "0 False", answer.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_runs_keep_their_model(zygote, tmp_path, shoal, signum):
    words = ["train", str(SMALL_TASK), "--workers", "2", "--epochs", "100000", "--name", "long"]
    process = subprocess.Popen(
        command(*words),
        cwd=tmp_path,
        env=environment(zygote),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for_steps(tmp_path / "runs" / "long" / "events.jsonl", process)
        process.send_signal(signum)
        out, err = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "stopped: interrupted" in out and "runs/long/model.safetensors" in err
    assert "Traceback" not in err
    report = (tmp_path / "runs" / "long" / "report.md").read_text()
    assert "interrupted" in report
    assert shoal("evaluate", "long").returncode == 0, "what was saved is a model"


def _wait_for_steps(events: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not (events.is_file() and '"kind": "steps"' in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_that_leaves_is_no_failure(zygote, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        answer = subprocess.run(
            command("train", str(SMALL_TASK), "--max-steps", "2", "--name", "mine"),
            cwd=tmp_path,
            env=environment(zygote),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=GUARD_S,
            check=False,
        )
    finally:
        os.close(writer)
    assert answer.returncode == 0 and answer.stderr == ""
    assert (tmp_path / "runs" / "mine" / "model.safetensors").is_file()


def test_without_a_zygote_it_starts_its_own(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "SHOAL_ZYGOTE"}
    answer = subprocess.run(
        command("train", str(SMALL_TASK), "--max-steps", "2", "--json"),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=True,
    )
    assert json.loads(answer.stdout)["steps"] == 2
