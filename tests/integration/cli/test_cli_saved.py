"""`shoal evaluate`, `predict` and `export`: what a saved model says, for any number of workers, and itself."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from small_task import NUM_TEST, NUM_TRAIN, task

from helpers.commands import SMALL_TASK
from helpers.other_user import NOBODY, needs_root
from shoal.checkpoint.folder import load_model


@pytest.fixture(scope="module")
def expected(trained):
    """The model's outputs on the test set, computed here."""
    given = task()
    module = given.model()
    load_model(trained / "model.safetensors", module)
    inputs = torch.stack([sample for sample, _ in given.dataset("test")])
    with torch.no_grad():
        return torch.cat([module.eval()(batch) for batch in inputs.split(given.batch_size)]).numpy()


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".csv":
        return np.loadtxt(path, delimiter=",", dtype=np.float64)
    return np.array([json.loads(line) for line in path.read_text().splitlines()])


@pytest.mark.parametrize(
    ("ending", "workers"),
    [
        ("jsonl", "1"),
        ("csv", "2"),
        ("npy", "2"),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("jsonl", "2"), ("csv", "1"), ("npy", "1"))),
    ],
)
def test_predictions_are_the_models_outputs_in_order(shoal, trained, expected, tmp_path, ending, workers):
    answer = shoal("predict", str(trained), "--out", f"out.{ending}", "--workers", workers, "--threads", "1")
    assert answer.returncode == 0, answer.stderr
    assert f"out.{ending}" in answer.stdout
    found = read(tmp_path / f"out.{ending}")
    assert found.shape == expected.shape
    # Text keeps every digit of a float32, so all three formats hold the same numbers.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_predictions_on_the_training_set(shoal, trained, tmp_path):
    answer = shoal("predict", str(trained), "--out", "out.npy", "--data", "train", "--workers", "2")
    assert answer.returncode == 0, answer.stderr
    assert len(np.load(tmp_path / "out.npy")) == NUM_TRAIN


def test_rows_go_to_standard_output_and_all_else_to_standard_error(shoal, trained, expected, tmp_path):
    np.save(tmp_path / "new.npy", np.stack([sample.numpy() for sample, _ in task().dataset("test")]))
    answer = shoal("predict", str(trained), "--input", "new.npy", "--workers", "2")
    assert answer.returncode == 0, answer.stderr
    found = np.array([json.loads(line) for line in answer.stdout.splitlines()])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "2 workers" in answer.stderr


def test_the_model_can_be_taken_away(shoal, trained, tmp_path):
    answer = shoal("export", str(trained), "--to", "torch", "--out", "taken.pt")
    assert answer.returncode == 0 and "the model is in taken.pt" in answer.stdout, answer.stderr
    taken = torch.load(tmp_path / "taken.pt", weights_only=True)
    load_model(trained / "model.safetensors", module := task().model())
    assert all(torch.equal(taken[name], value) for name, value in module.state_dict().items())
    answer = shoal("export", str(trained), "--to", "tochr")
    assert answer.returncode == 2 and "Did you mean 'torch'" in answer.stderr


def test_evaluations_do_not_depend_on_the_workers(shoal, trained):
    results = json.loads((trained / "result.json").read_text())["results"]
    for workers in ("1", "2"):
        answer = shoal("evaluate", str(trained), "--workers", workers, "--json")
        found = json.loads(answer.stdout)
        assert found == {"run": str(trained), "data": "test", "samples": NUM_TEST, "results": results}
    answer = shoal("evaluate", str(trained), "--data", "train")
    assert answer.returncode == 0 and "200 train samples: train loss" in answer.stdout


@pytest.fixture
def planted(trained, tmp_path):
    """A run folder of another user's, whose code leaves a mark when it is run."""
    folder = shutil.copytree(trained, tmp_path / "runs" / "planted")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n{SMALL_TASK.read_text()}")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, "target": f"{folder / 'evil.py'}:task"}))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return folder


@needs_root
def test_the_code_of_another_users_run_is_run_only_when_trusted(shoal, planted, tmp_path):
    ways = [
        ("evaluate", "planted"),
        ("evaluate", str(planted), "--workers", "2"),
        ("predict", "planted", "--out", "out.npy"),
        ("train", "--resume", "planted"),
        ("train", "--resume", "planted", "--explain"),
        ("verify", "--replay", "planted"),
    ]
    for words in ways:
        answer = shoal(*words)
        assert answer.returncode == 2, (words, answer.stderr)
        assert "belongs to user nobody" in answer.stderr and "--trust" in answer.stderr, words
        assert len(answer.stderr.strip().splitlines()) <= 4, answer.stderr
    assert not (tmp_path / "mark").exists() and not (planted / "lock").exists()
    answer = shoal("evaluate", "planted", "--trust")
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "mark").exists()


def test_trust_is_about_a_run(shoal):
    for words in (("train", str(SMALL_TASK), "--trust"), ("verify", str(SMALL_TASK), "--trust")):
        answer = shoal(*words)
        assert answer.returncode == 2 and "--trust is about the code of a run" in answer.stderr
