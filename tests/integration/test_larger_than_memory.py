"""A model that no worker may hold: refused where each would need all of it, trained where it is cut."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import large_tasks
import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import LaunchError, WorkerFailed
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import find_whole, resumed_job
from shoal.launch.supervisor import Supervisor
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("large_tasks.py")
LIMIT = "112MiB"
"""Training keeps 160 MiB for the model; a third of it, and room to compute, is less than this."""
WORKERS = 3

CUTS = ("sharded", "pipeline:split=4+4+3")
DEEP = 24
"""Blocks of a model that is larger than the limit by itself."""


@dataclass
class Train:
    """Trains the task with so many workers, which may use so much memory."""

    folder: Path
    zygote: ZygoteProcess

    def __call__(self, strategy: str, workers: int, memory: str = "", **words: Any) -> dict[str, Any]:
        cluster = Cluster(workers=workers, threads=1, memory=memory)
        named = {name: words.pop(name) for name in ("checkpoint", "chaos", "options") if name in words}
        return self.run(Job(target=f"{TASKS}:task", args=words, strategy=strategy, cluster=cluster, **named))

    def run(self, job: Job) -> dict[str, Any]:
        job = replace(job, run_dir=str(self.next_folder()))
        Path(job.run_dir).mkdir()
        (Path(job.run_dir) / "job.json").write_text(job.to_json())
        results = Supervisor(job, lambda event: None, LocalEngine(self.zygote)).run()
        load_tensors(Path(job.run_dir) / "model.safetensors")  # whole, and what its digest says
        return results

    def next_folder(self) -> Path:
        return self.folder / f"run-{len(list(self.folder.iterdir()))}"


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(tmp_path, zygote)


@pytest.mark.parametrize(
    ("strategy", "limit", "copies"),
    [("data", LIMIT, 1 + 2 + 2 + 1), pytest.param("ps", "75MiB", 3 + 4 + 2, marks=pytest.mark.long)],
)
def test_refused_where_every_worker_would_hold_it(train: Train, strategy: str, limit: str, copies: int) -> None:
    """`copies` of 40 MiB: values, AdamW's state and gradients, which all share; the model as each builds it."""
    with pytest.raises(WorkerFailed) as refused:
        train(strategy, 2, limit)
    told = str(refused.value)
    found = re.search(rf"strategy={strategy} and 2 workers one needs (\d+\.\d) MiB, most of it for ", told)
    assert found is not None, told
    assert copies * 40.2 < float(found[1]) < copies * 40.2 + 32
    assert "sharded with " in told and "pipeline with " in told
    assert not refused.value.details, "a sentence is enough"


@pytest.mark.parametrize(
    ("strategy", "ways"),
    [
        (CUTS[0], CUTS[:1]),
        pytest.param(CUTS[0], CUTS[1:], marks=pytest.mark.long),
        pytest.param(CUTS[1], CUTS, marks=pytest.mark.long),
    ],
)
def test_trains_where_it_is_cut_and_goes_on_after_a_kill(
    train: Train, strategy: str, ways: tuple[str, ...]
) -> None:
    """The saved state alone, 120 MiB, is more than a worker may use: it is written and read tensor by tensor."""
    expected = train("data", 1, steps=3)["loss"]
    whole = train(strategy, WORKERS, LIMIT, steps=3)
    assert whole["loss"] == pytest.approx(expected, rel=1e-5)

    killed = train.next_folder()
    with pytest.raises(LaunchError, match="Worker 1 was killed"):
        train(strategy, WORKERS, LIMIT, steps=3, checkpoint="every=1", chaos="kill worker:1 at step 3")
    path, manifest = find_whole(str(killed), train.folder, print)
    assert manifest.step in (1, 2) and manifest.nbytes > 112 << 20
    for way in ways:
        changes = {"strategy": way, "chaos": ""}
        job = resumed_job(Job.from_json((killed / "job.json").read_text()), path, manifest, changes)
        assert job.cluster.memory == LIMIT
        resumed = train.run(job)
        if way == strategy:
            assert (resumed["digest"], resumed["loss"]) == (whole["digest"], whole["loss"])
        else:
            assert resumed["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("source", ["model.safetensors", "checkpoints/step-000000002"])
def test_begins_from_weights_that_no_worker_may_hold(train: Train, source: str) -> None:
    before = train.next_folder()
    train("sharded", WORKERS, LIMIT, steps=2, checkpoint="every=2")
    options = {"from": str(before / source)}
    expected = train("data", 1, options=options)["loss"]
    for strategy in CUTS:
        assert train(strategy, WORKERS, LIMIT, options=options)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_measured_split_heeds_the_limit(train: Train) -> None:
    """Two stages of three blocks each, and one of two, are all that leaves some room."""
    assert train("pipeline", WORKERS, LIMIT)["loss"] == pytest.approx(train("data", 1)["loss"], rel=1e-5)


@pytest.mark.long
def test_too_little_to_compute_in_is_explained(train: Train) -> None:
    """The parameters would fit, but not the blocks that are gathered while they are used."""
    with pytest.raises(WorkerFailed) as failed:
        train("sharded", WORKERS, "65MiB")
    told = str(failed.value)
    assert "memory allows each worker 65.0 MiB" in told and "3 workers one needs" in told
    assert "pipeline with " in told


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "limit"),
    [
        ("sharded", LIMIT),
        ("pipeline:split=3+3+3+2", LIMIT),
        ("pipeline:schedule=zero-bubble,split=3+3+3+2", LIMIT),
        ("mesh:shard=2,pipeline=2,split=5+6", "144MiB"),
    ],
)
def test_a_limit_does_not_change_a_bit(train: Train, strategy: str, limit: str) -> None:
    # Stages are given, not measured; where the shard axis cuts a parameter, and so its last bits, depends on them.
    limited, free = (train(strategy, 4, memory, steps=4) for memory in (limit, ""))
    assert limited["digest"] == free["digest"]
    assert limited["loss"] == free["loss"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, float]:
    """A run whose model has 120 MiB; its outputs, and its loss."""
    folder, given = tmp_path_factory.mktemp("saved"), large_tasks.task(depth=DEEP)
    torch.manual_seed(1)
    model = given.model().eval()
    save_tensors(folder / "model.safetensors", model.state_dict())
    job = Job(target=f"{TASKS}:task", args={"depth": DEEP}, strategy="sharded", cluster=Cluster(workers=WORKERS))
    (folder / "job.json").write_text(job.to_json())
    inputs, targets = given.train.tensors
    with torch.no_grad():
        scores = model(inputs)
        return folder, scores, nn.functional.cross_entropy(scores, targets).item()


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("pipeline:split=9+9+9", marks=pytest.mark.long)])
def test_is_evaluated_and_predicted_with_where_it_is_cut(
    saved: tuple[Path, torch.Tensor, float], strategy: str, zygote: ZygoteProcess, tmp_path: Path
) -> None:
    """Nobody ever has more than a part of it, and the numbers are those of one process."""
    folder, scores, loss = saved
    cluster = Cluster(workers=WORKERS, threads=1, memory=LIMIT)
    options = {
        "data": "train",
        "strategy": strategy,
        "cluster": cluster,
        "output": io.StringIO(),
        "zygote": zygote,
    }
    assert shoal.evaluate(folder, **options).results["loss"] == pytest.approx(loss, rel=1e-5)
    rows = np.load(shoal.predict(folder, tmp_path / "out.npy", **options))
    np.testing.assert_allclose(rows, scores.numpy(), rtol=1e-4, atol=1e-5)


def test_is_not_evaluated_where_every_worker_would_hold_it(
    saved: tuple[Path, torch.Tensor, float], zygote: ZygoteProcess
) -> None:
    with pytest.raises(WorkerFailed, match=r"112\.0 MiB, which was too little for strategy=data"):
        shoal.evaluate(
            saved[0],
            data="train",
            strategy="data",
            cluster=Cluster(threads=1, memory=LIMIT),
            output=io.StringIO(),
            zygote=zygote,
        )
