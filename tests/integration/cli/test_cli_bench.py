"""`shoal bench`: strategies side by side on a task, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from helpers.commands import GUARD_S, SMALL_TASK, command, environment

OBJECTIVE_TASK = """
import shoal, torch
from torch import nn
from torch.utils.data import TensorDataset

def task(batch_per_worker: bool = True):
    return shoal.Task(
        model=lambda: nn.Linear(4, 1),
        objective=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(40, 4), torch.randn(40, 1)),
        batch_size=8,
        batch_per_worker=batch_per_worker,
    )
"""


def test_strategies_are_compared_on_a_task(shoal, tmp_path):
    words = ["--workers", "2", "--steps", "20", "--rounds", "1", "--strategies", "data,ps:sync=asp"]
    answer = shoal("bench", str(SMALL_TASK), *words, "--json", "--out", "kept")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    alone, data, asynchronous = found["rows"]
    assert [row["strategy"] for row in found["rows"]] == ["one process", "data", "ps:sync=asp"]
    assert found["left_out"] == {} and (found["steps"], found["total_steps"], found["batch_size"]) == (20, 28, 16)
    for row in found["rows"]:
        assert row["samples_per_s"] > 0 and row["first_step_s"] > 0 and row["peak_memory"] > 1e6
    assert [len(row["rounds"][0]["peak_memory"]) for row in found["rows"]] == [1, 2, 2]
    # The same samples in lockstep: the same loss, but for the order of sums.
    assert data["loss"] == pytest.approx(alone["loss"], rel=1e-3) and 0 < asynchronous["loss"] < 5
    assert json.loads((tmp_path / "kept" / "bench.json").read_text()) == found
    assert (tmp_path / "kept" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "round 1 of 1: data" in answer.stderr


def test_what_cannot_train_a_task_is_listed_with_the_reason(shoal, tmp_path):
    (tmp_path / "mine.py").write_text(OBJECTIVE_TASK)
    words = ["--seconds", "0.01", "--rounds", "1", "--strategies", "data,layer:decoupled=on,mesh:data=3"]
    answer = shoal("bench", "mine.py", *words)
    text = " ".join(answer.stdout.split())
    assert answer.returncode == 0, answer.stderr
    assert "Task: objective= computes the loss from model and batch in one go, but" in text
    assert "mesh:data=3 mesh: data=3 is a grid of 3 workers, but the job has 2;" in text
    assert "steps of 16 samples" in text, "a batch of all workers"
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_ctrl_c_leaves_a_table_of_what_was_measured(zygote, tmp_path):
    words = ["bench", str(SMALL_TASK), "--steps", "20", "--rounds", "1000", "--strategies", "data"]
    with subprocess.Popen(
        command(*words),
        cwd=tmp_path,
        env=environment(zygote),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert any("round 2 of 1000" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, err
    assert "one process" in out and "Broken off" in out and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "There is no file 'nowhere.py'"),
        ([str(SMALL_TASK), "--workers", "1"], "use 2 or more"),
        ([str(SMALL_TASK), "--strategies", "dta"], "Did you mean 'data'"),
        ([str(SMALL_TASK), "--steps", "9", "--seconds", "1"], "both say how long a run is"),
        ([str(SMALL_TASK), "--out", "a-file"], "is a file; name a folder"),
    ],
    ids=["target", "workers", "strategy", "length", "out"],
)
def test_wrong_wishes_are_one_sentence(shoal, tmp_path, words, sentence):
    (tmp_path / "a-file").touch()
    answer = shoal("bench", *words)
    assert answer.returncode == 2 and sentence in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr and answer.stdout == ""
