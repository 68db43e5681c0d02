"""A model that no worker may hold: refused where each would need all of it, trained where it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import load_tensors
from shoal.errors import WorkerFailed
from shoal.launch import LocalEngine, Supervisor, ZygoteProcess
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("large_tasks.py")
LIMIT = "112MiB"
"""Training keeps 160 MiB for the model; a third of it, and room to compute, is less than this."""
WORKERS = 3

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    def run(strategy: str, workers: int, memory: str = "", **args: Any) -> dict[str, Any]:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        job = Job(
            target=f"{TASKS}:task",
            args=args,
            strategy=strategy,
            cluster=Cluster(workers=workers, threads=1, memory=memory),
            run_dir=str(folder),
        )
        results = Supervisor(job, lambda event: None, LocalEngine(zygote)).run()
        load_tensors(folder / "model.safetensors")  # whole, and what its digest says
        return results

    return run


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


def test_trains_where_it_is_cut(train: Train) -> None:
    expected = train("data", 1)["loss"]
    for strategy in ("sharded", "pipeline:split=4+4+3"):  # a measured split may be uneven on a busy machine
        assert train(strategy, WORKERS, LIMIT)["loss"] == pytest.approx(expected, rel=1e-5), strategy


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
