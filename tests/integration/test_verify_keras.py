"""`shoal verify` on Keras models with BatchNorm and dropout, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.launch.owner import ZygoteProcess
from shoal.verification import ResultReport, VerifyReport, verify

TASKS = f"{Path(__file__).parents[1] / 'equivalence' / 'keras_tasks.py'}:made"
pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("form", "optimizer", "strategy", "workers"),
    [
        ("line", "adamw", "data", 2),
        ("graph", "sgd", "data:batchnorm=sync", 4),
        ("code", "whole", "data", 4),
        ("line", "sgd", "ps:servers=2", 2),
        ("code", "adamw", "ps", 2),
        ("line", "adamw", "sharded:stage=3", 2),
        ("graph", "sgd", "sharded:batchnorm=sync", 2),
        ("line", "sgd", "pipeline:microbatches=2", 2),
        ("graph", "adamw", "pipeline:microbatches=2", 2),
        ("graph", "sgd", "layer", 2),
        ("line", "plain", "average:every=1", 2),
        ("code", "plain", "average:every=1", 2),
    ],
)
def test_both_comparisons_hold(
    form: str, optimizer: str, strategy: str, workers: int, zygote: ZygoteProcess
) -> None:
    args = {"form": form, "optimizer": optimizer}
    report = verify(TASKS, workers=workers, strategy=strategy, steps=6, args=args, zygote=zygote)
    assert isinstance(report, VerifyReport) and report.ok, report
    double = [row for row in report.rows if "float64" in row.comparison]
    assert double and all(row.measured < row.bound == 1e-9 for row in double)


@pytest.mark.parametrize("sync", ["asp", "ssp:3"])
def test_workers_at_their_own_pace_come_as_far_over_seeds(sync: str, zygote: ZygoteProcess) -> None:
    report = verify(
        TASKS,
        workers=2,
        strategy=f"ps:sync={sync}",
        seeds=3,
        args={"form": "line", "optimizer": "sgd"},
        zygote=zygote,
    )
    assert isinstance(report, ResultReport) and report.ok, report
    assert len(report.ours) == len(report.references) == 3 and not report.lost_runs
