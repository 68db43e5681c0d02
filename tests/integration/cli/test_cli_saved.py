"""`shoal evaluate` and `shoal predict`: what a saved model says, for any number of workers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from small_task import NUM_TEST, NUM_TRAIN, task

from shoal.checkpoint import load_model


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


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "npy"])
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


def test_evaluations_do_not_depend_on_the_workers(shoal, trained):
    results = json.loads((trained / "result.json").read_text())["results"]
    for workers in ("1", "2"):
        answer = shoal("evaluate", str(trained), "--workers", workers, "--json")
        found = json.loads(answer.stdout)
        assert found == {"run": str(trained), "data": "test", "samples": NUM_TEST, "results": results}
    answer = shoal("evaluate", str(trained), "--data", "train")
    assert answer.returncode == 0 and "200 train samples: train loss" in answer.stdout
