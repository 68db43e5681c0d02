"""Metrics that are no means: of a run they are what scikit-learn says of the outputs that `predict` writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import metric_tasks
import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

import shoal
from helpers.training import Train
from shoal.launch.owner import ZygoteProcess

TASKS = Path(metric_tasks.__file__)
TARGETS = metric_tasks.TARGETS[64:].numpy()


def expected_of(outputs: np.ndarray) -> dict[str, float]:
    classes = outputs.argmax(1)
    shares = torch.from_numpy(outputs).double().softmax(1).numpy()
    return {
        "f1": f1_score(TARGETS, classes, average="macro"),
        "accuracy": float((classes == TARGETS).mean()),
        "auc": roc_auc_score(TARGETS, shares, multi_class="ovr"),
        "ranks": float((classes == TARGETS) @ np.arange(1, len(TARGETS) + 1)),
    }


@pytest.mark.parametrize(
    ("workers", "strategy", "args"),
    [
        pytest.param(1, "data", {}, marks=pytest.mark.long),
        pytest.param(2, "data", {"objective": True}, marks=pytest.mark.long),
        (3, "data", {}),
        pytest.param(2, "data:via=ring", {}, marks=pytest.mark.long),
        (2, "ps:servers=1", {"objective": True}),
        pytest.param(2, "sharded", {"objective": True}, marks=pytest.mark.long),
        (2, "tensor", {}),
        pytest.param(2, "pipeline", {}, marks=pytest.mark.long),
        pytest.param(2, "layer:place=0@0+2@1+4@1", {}, marks=pytest.mark.long),
    ],
)
def test_they_are_those_of_what_is_predicted(
    tmp_path: Path, zygote: ZygoteProcess, workers: int, strategy: str, args: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"output": io.StringIO(), "zygote": zygote}
    run = shoal.train(
        f"{TASKS}:task",
        args=args,
        strategy=strategy,
        cluster={"workers": workers, "threads": 1},
        runs=tmp_path,
        **how,
    )
    outputs = np.load(shoal.predict(run.folder, tmp_path / "out.npy", workers=workers, **how))
    expected = expected_of(outputs)
    found = dict(run.results["results"])
    assert list(found) == ["loss", "f1", "accuracy", "auc", "ranks"] and found.pop("loss") > 0
    assert found == pytest.approx(expected, abs=1e-9, rel=0)
    afterwards = dict(shoal.evaluate(run.folder, strategy="data", workers=3, **how).results)
    del afterwards["loss"]
    assert afterwards == pytest.approx(expected, abs=1e-9, rel=0)


def test_a_killed_worker_changes_none(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """Who follows the first one, which computes them for all, finds those of evaluations before."""
    train = Train(TASKS, tmp_path, zygote)
    calm = train("task", workers=2, every=2)
    stormy = train("task", workers=2, every=2, spares=2, chaos="kill worker:0 at step 5; kill worker:1 at step 9")
    assert len(stormy.told("replaced")) == 2
    assert stormy.digests() == calm.digests() and stormy.results["results"] == calm.results["results"]
    by_step = [{told["step"]: told["results"] for told in run.told("evaluation")} for run in (calm, stormy)]
    assert by_step[0] == by_step[1] and len(by_step[0]) == 8
