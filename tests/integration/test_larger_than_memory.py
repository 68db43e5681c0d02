"""A model that no worker may hold: refused where each would need all of it, trained where it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import load_tensors
from shoal.errors import LaunchError, WorkerFailed
from shoal.launch import LocalEngine, Supervisor, ZygoteProcess
from shoal.launch.resuming import find_whole, resumed_job
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("large_tasks.py")
LIMIT = "112MiB"
"""Training keeps 160 MiB for the model; a third of it, and room to compute, is less than this."""
WORKERS = 3

CUTS = ("sharded", "pipeline:split=4+4+3")


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
    ("strategy", "limit", "needed"),
    [("data", LIMIT, "160.9 MiB"), pytest.param("ps", "75MiB", "80.4 MiB", marks=pytest.mark.long)],
)
def test_refused_where_every_worker_would_hold_it(train: Train, strategy: str, limit: str, needed: str) -> None:
    with pytest.raises(WorkerFailed) as refused:
        train(strategy, 2, limit)
    told = str(refused.value)
    assert f"strategy={strategy} and 2 workers one needs {needed}" in told
    assert "sharded with " in told and "pipeline with " in told
    assert not refused.value.details, "a sentence is enough"


@pytest.mark.parametrize("strategy", [CUTS[0], pytest.param(CUTS[1], marks=pytest.mark.long)])
def test_trains_where_it_is_cut_and_goes_on_after_a_kill(train: Train, strategy: str) -> None:
    """The saved state alone, 120 MiB, is more than a worker may use: it is written and read tensor by tensor."""
    expected = train("data", 1, steps=4)["loss"]
    whole = train(strategy, WORKERS, LIMIT, steps=4)
    assert whole["loss"] == pytest.approx(expected, rel=1e-5)

    killed = train.next_folder()
    with pytest.raises(LaunchError, match="Worker 1 was killed"):
        train(strategy, WORKERS, LIMIT, steps=4, checkpoint="every=1", chaos="kill worker:1 at step 4")
    path, manifest = find_whole(str(killed), train.folder, print)
    assert manifest.step in (2, 3) and manifest.nbytes > 112 << 20
    for way in CUTS:
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
    """The parameters would fit, but not what comes with them."""
    with pytest.raises(WorkerFailed) as failed:
        train("sharded", WORKERS, "65MiB")
    told = str(failed.value)
    assert "65.0 MiB" in told and "too little" in told
    assert "pipeline with 4 workers needs 40.4 MiB each" in told


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
