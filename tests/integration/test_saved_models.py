"""Prediction and evaluation with a saved model: the same for any number of workers, as the model itself says."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import odd_tasks
import pytest
from odd_tasks import INPUTS
from torch import nn

import shoal
from helpers.training import largest_difference
from shoal.checkpoint import load_model, load_tensors
from shoal.launch import ZygoteProcess

TASKS = Path(__file__).with_name("odd_tasks.py")


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> shoal.Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return shoal.train(f"{TASKS}:evaluated_often", workers=2, name="mine", output=io.StringIO(), zygote=zygote)


def test_rows_come_in_order_from_any_number_of_workers(run: shoal.Run, zygote: ZygoteProcess) -> None:
    model = nn.Linear(6, 3)
    load_model(run.folder / "model.safetensors", model)
    for workers in (1, 3):
        path = shoal.predict(
            run.folder, f"out-{workers}.npy", workers=workers, output=io.StringIO(), zygote=zygote
        )
        np.testing.assert_allclose(np.load(path), model(INPUTS).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_an_evaluation_afterwards_is_the_last_one_of_the_run(run: shoal.Run, zygote: ZygoteProcess) -> None:
    for workers in (1, 2):
        evaluation = shoal.evaluate(run.folder, workers=workers, output=io.StringIO(), zygote=zygote)
        assert evaluation.results == run.results["results"]


def test_a_model_that_gives_no_row_per_sample_is_refused(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("summing.py").write_text(
        f"import sys; sys.path.insert(0, {str(TASKS.parent)!r})\n"
        "import odd_tasks\n"
        "from torch import nn\n"
        "class Summed(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        scores = super().forward(x)\n"
        "        return scores if self.training else scores.sum()\n"
        "def task():\n"
        "    return odd_tasks.make(lambda: Summed(6, 3))\n"
    )
    run = shoal.train("summing.py", output=io.StringIO(), zygote=zygote)
    with pytest.raises(shoal.ShoalError, match=r"for 16 samples the model returned shape \(\)"):
        shoal.predict(run.folder, "out.npy", data="train", output=io.StringIO(), zygote=zygote)


def test_the_saved_model_is_the_trained_one(run: shoal.Run) -> None:
    trainer = shoal.Trainer(odd_tasks.evaluated_often())
    trainer.fit()
    saved = load_tensors(run.folder / "model.safetensors")
    assert largest_difference(saved, dict(trainer.model.state_dict())) < 1e-5
