"""Prediction and evaluation with a saved model: the same for any number of workers, as the model itself says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import every_way
import numpy as np
import odd_tasks
import pytest
import torch
from odd_tasks import INPUTS
from torch import nn
from torch.nn import functional as F

import shoal
from helpers.training import largest_difference
from shoal.checkpoint.folder import load_model
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("odd_tasks.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> shoal.Run:
    return shoal.train(
        f"{TASKS}:evaluated_often",
        cluster={"workers": 2, "threads": 1},
        runs=tmp_path_factory.mktemp("trained"),
        output=io.StringIO(),
        zygote=zygote,
    )


@pytest.fixture
def run(trained: shoal.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shoal.Run:
    """A trained model, for who only reads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return trained


def test_rows_come_in_order_from_any_number_of_workers(run: shoal.Run, zygote: ZygoteProcess) -> None:
    model = nn.Linear(6, 3)
    load_model(run.folder / "model.safetensors", model)
    for workers in (1, 3):
        path = shoal.predict(
            run.folder, f"out-{workers}.npy", workers=workers, output=io.StringIO(), zygote=zygote
        )
        np.testing.assert_allclose(np.load(path), model(INPUTS).detach().numpy(), rtol=1e-5, atol=1e-6)


def write_new(kind: str) -> Path:
    """The inputs as a file, or a folder of files, of this kind."""
    path = Path("new" if kind == "folder" else f"new.{kind}")
    if kind == "npy":
        np.save(path, INPUTS.numpy())
    elif kind == "folder":
        path.mkdir()
        for number, row in enumerate(INPUTS):
            np.save(path / f"{number:03}.npy", row.numpy())
    else:
        written = (str(row) if kind == "jsonl" else str(row)[1:-1] for row in INPUTS.tolist())
        path.write_text("\n".join(written))
    return path


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("npy", 2),
        ("csv", 1),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("jsonl", 2), ("folder", 1))),
    ],
)
def test_new_data_is_predicted_as_the_tasks_own(
    run: shoal.Run, zygote: ZygoteProcess, kind: str, workers: int
) -> None:
    options = {"workers": workers, "output": io.StringIO(), "zygote": zygote}
    path = shoal.predict(run.folder, "out.npy", input=write_new(kind), **options)
    with torch.no_grad():
        np.testing.assert_allclose(np.load(path), run.model()(INPUTS).numpy(), rtol=1e-5, atol=1e-6)


def test_dict_batches_and_output_objects(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named.py").write_text(
        f"import sys; sys.path.insert(0, {str(TASKS.parent)!r})\n"
        "import odd_tasks\n"
        "from torch import nn\n"
        "class Named(nn.Linear):\n"
        "    def forward(self, x, labels=None):\n"
        "        scores = super().forward(x)\n"
        "        loss = None if labels is None else nn.functional.cross_entropy(scores, labels)\n"
        "        return {'loss': loss, 'logits': scores, 'best': scores.argmax(1)}\n"
        "def task():\n"
        "    train = [{'x': x, 'labels': y, 'id': 0} for x, y in odd_tasks.PAIRS]\n"
        "    def objective(model, batch):\n"
        "        return model(batch['x'], batch['labels'])['loss']\n"
        "    return odd_tasks.make(lambda: Named(6, 3), objective=objective, train=train)\n"
    )
    options = {"output": io.StringIO(), "zygote": zygote}
    run = shoal.train("named.py", **options)
    Path("new.jsonl").write_text("\n".join(json.dumps({"x": row}) for row in INPUTS.tolist()))
    with torch.no_grad():
        expected = run.model()(INPUTS)
    for given in ({"data": "train"}, {"input": "new.jsonl"}):
        rows = map(json.loads, shoal.predict(run.folder, "out.jsonl", **given, **options).read_text().splitlines())
        for row, scores, best in zip(rows, expected["logits"].tolist(), expected["best"].tolist(), strict=True):
            assert row == {"logits": pytest.approx(scores, rel=1e-4, abs=1e-5), "best": best}
    rows = np.load(shoal.predict(run.folder, "out.npy", data="train", **options))
    np.testing.assert_allclose(rows, expected["logits"].numpy(), rtol=1e-5, atol=1e-6)


def test_an_evaluation_afterwards_is_the_last_one_of_the_run(run: shoal.Run, zygote: ZygoteProcess) -> None:
    for workers in (1, 2):
        evaluation = shoal.evaluate(run.folder, workers=workers, output=io.StringIO(), zygote=zygote)
        assert evaluation.results == run.results["results"]


CUTS = ("sharded", "tensor", "pipeline:split=3+3", "layer:place=0@0+2@1+5@1")


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A run that every strategy can go on with, and its model."""
    torch.manual_seed(1)
    folder, model = tmp_path / "chain", every_way.task().model().eval()
    folder.mkdir()
    save_tensors(folder / "model.safetensors", model.state_dict())
    target = f"{Path(every_way.__file__)}:task"
    (folder / "job.json").write_text(Job(target=target, strategy="ps", cluster=Cluster(workers=2)).to_json())
    return folder, model


@pytest.mark.parametrize("strategy", [*CUTS, "data:via=ring", None])
def test_every_strategy_evaluates_and_predicts_alike(
    chain: tuple[Path, nn.Module], zygote: ZygoteProcess, strategy: str | None
) -> None:
    """Three batches go round one lane or two; the run's own strategy has servers, of which none is needed."""
    folder, model = chain
    with torch.no_grad():
        scores = model(every_way.INPUTS)
        expected = F.cross_entropy(scores, every_way.TARGETS).item()
    options = {"data": "train", "workers": 2, "strategy": strategy, "output": io.StringIO(), "zygote": zygote}
    found = shoal.evaluate(folder, **options)
    assert found.samples == len(scores)
    assert found.results["loss"] == pytest.approx(expected, rel=1e-5)
    rows = np.load(shoal.predict(folder, folder / "out.npy", **options))
    np.testing.assert_allclose(rows, scores.numpy(), rtol=1e-5, atol=1e-6)


def test_a_run_that_cuts_its_model_is_read_as_it_was_trained(
    chain: tuple[Path, nn.Module], zygote: ZygoteProcess
) -> None:
    """By default with the strategy and the workers that it had; whatever optimizer it was trained with."""
    folder, _ = chain
    job = json.loads((folder / "job.json").read_text())
    for strategy in ("sharded", "average:inside=mesh:tensor:2", "data"):
        (folder / "job.json").write_text(json.dumps({**job, "strategy": strategy}))
        said = io.StringIO()
        shoal.evaluate(folder, progress=False, output=said, zygote=zygote)
        assert ("2 workers" in said.getvalue()) == (strategy != "data")


def test_an_objective_is_evaluated_however_the_model_is_cut(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shoal.train(f"{TASKS}:own_objective", output=io.StringIO(), zygote=zygote)
    options = {"data": "train", "workers": 2, "output": io.StringIO(), "zygote": zygote}
    expected = shoal.evaluate(run.folder, **options).results
    for strategy in ("sharded", "pipeline"):
        assert shoal.evaluate(run.folder, strategy=strategy, **options).results == pytest.approx(expected)
    with pytest.raises(shoal.ShoalError, match=r"objective= computes the loss .* a loss of its own"):
        shoal.evaluate(run.folder, strategy="layer:decoupled=on", **options)


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
