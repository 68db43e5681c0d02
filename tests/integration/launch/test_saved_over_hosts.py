"""Models are evaluated and asked over several hosts, with the results of one; also in the middle of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.agents import SeenStarter, run_on_hosts, spread_cluster
from helpers.apart import NEEDS_NAMESPACES, ssh_to_others, write_task
from shoal.checkpoint.model_stream import save_tensors
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.saved import evaluate, predict, predictions
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

METRICS = Path(__file__).parents[1] / "metric_tasks.py"
APART = {"workers": 2, "threads": 1, "on": "ssh:other,first", "interface": "127.0.0.1"}
"""One of these hosts has neither the task nor the runs."""


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a run, as far as it takes to use its model."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,)}
    chance = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "job.json").write_text(Job(target=write_task(tmp_path / "work")).to_json())
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh", [tmp_path / "work", tmp_path / "runs"]))
    return str(folder)


@NEEDS_NAMESPACES
def test_a_model_travels_to_hosts_that_read_it(run: str, tmp_path: Path) -> None:
    """So does new data; rows come back in order, and none is missing."""
    here = evaluate(run, data="train", progress=False)
    there = evaluate(run, data="train", cluster=APART, progress=False)
    assert there == here and there.samples == 64
    new = tmp_path / "new.npy"
    np.save(new, np.arange(400, dtype=np.float32).reshape(100, 4) / 400)
    rows = {
        name: np.load(predict(run, tmp_path / f"{name}.npy", input=new, cluster=cluster, progress=False))
        for name, cluster in (("here", None), ("there", APART))
    }
    assert len(rows["there"]) == 100 and np.array_equal(rows["here"], rows["there"])
    coming = predictions(run, iter(np.load(new)), cluster=APART)
    assert np.array_equal(np.stack(list(coming)), rows["here"])


def trained_on_one_host(job: Job, folder: Path, zygote: ZygoteProcess) -> dict[str, Any]:
    folder.mkdir()
    alone = replace(job, strategy="data", cluster=Cluster(workers=3, threads=1), run_dir=str(folder))
    return Supervisor(alone, lambda event: None, LocalEngine(zygote)).run()


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("data", "host-1"),
        pytest.param("data", "", marks=pytest.mark.long),
        pytest.param("data:via=ring", "", marks=pytest.mark.long),
    ],
)
def test_metrics_that_are_no_means_are_those_of_one_host(
    strategy: str, victim: str, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    """What batches came to lies on all hosts until it is put together; a lost host may take some with it."""
    job = Job(
        target=str(METRICS),
        strategy=strategy,
        args={"every": 20},
        overrides={"epochs": 20},
        cluster=spread_cluster(3, hosts=2),
    )
    struck: list[str] = []

    def strike(event: Event, starter: SeenStarter) -> None:
        if victim and not struck and event.kind == "evaluation":
            struck.append(victim)
            starter.kill(victim)

    results, events = run_on_hosts(job, tmp_path / "run", on_event=strike)
    expected = trained_on_one_host(job, tmp_path / "here", zygote)
    assert results["results"].keys() == {"loss", "f1", "accuracy", "auc", "ranks"}
    assert results["results"] == pytest.approx(expected["results"], rel=1e-3)
    assert struck == ([victim] if victim else [])
    assert [event.kind for event in events if event.kind in ("host", "restarted")] == ["host"] * len(struck)
