"""Several ways to cut a model at once: the parts fit together."""

from __future__ import annotations

import pytest
from cut_references import TASKS, References, check

from helpers.training import Train
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.saved import evaluate
from shoal.spec import Cluster, Job


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> References:
    return References(Train(TASKS, tmp_path_factory.mktemp("references"), zygote))


@pytest.mark.parametrize(
    ("strategy", "factory"), [("mesh:shard=2,tensor=2", "mlp"), ("mesh:data=2,pipeline=2", "gpt")]
)
def test_a_pair_computes_what_one_process_computes(references: References, strategy: str, factory: str) -> None:
    check(references, factory, strategy, 4, optimizer="adamw")


def test_the_saved_model_is_whole(references: References) -> None:
    """Whoever evaluates it needs no grid."""
    trained = references.train("mlp", workers=2, strategy="sharded", optimizer="adamw")
    again = evaluate(trained.job.run_dir, strategy="data", progress=False, zygote=references.train.zygote)
    assert again.results == pytest.approx(trained.results["results"], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "workers", "message"),
    [
        (
            "mesh:data=2,tensor=2",
            3,
            r"data=2 x tensor=2 is a grid of 4 workers, but the job has 3; use --workers 4",
        ),
        ("mesh", 2, r"data=1 is a grid of 1 workers, but the job has 2"),
        ("mesh:pipeline=2,batchnorm=sync", 2, "pass a layer one after the other"),
    ],
)
def test_grids_that_cannot_be(strategy: str, workers: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Job(target="a.py", strategy=strategy, cluster=Cluster(workers=workers))


def test_a_fault_strikes_the_part_of_the_batch_that_a_worker_has() -> None:
    job = Job(target="a.py", strategy="mesh:data=2,tensor=2", cluster=Cluster(workers=4))
    assert [list(job.conduct.fills[rank]) for rank in range(4)] == [[0], [0], [1], [1]]
