"""Training on GPUs through torch's own collectives; runs where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.errors import SpecError
from shoal.launch import LocalEngine, Supervisor, ZygoteProcess
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"


def train(zygote: ZygoteProcess, folder: Path, device: str, workers: int, strategy: str = "data") -> float:
    job = Job(
        target=f"{TASKS}:mlp_quiet",
        cluster=Cluster(workers=workers, threads=1, device=device),
        strategy=strategy,
        run_dir=str(folder),
    )
    return float(Supervisor(job, lambda event: None, LocalEngine(zygote)).run()["loss"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(("workers", "strategy"), [(1, "data"), (1, "data:via=backend"), (2, "data")])
def test_gpu_follows_the_cpu(zygote: ZygoteProcess, tmp_path: Path, workers: int, strategy: str) -> None:
    expected = train(zygote, tmp_path, "cpu", workers)
    assert train(zygote, tmp_path, "cuda", workers, strategy) == pytest.approx(expected, rel=1e-4)


def test_what_needs_the_hosts_memory_is_refused() -> None:
    with pytest.raises(SpecError, match="via=backend"):
        Job(target="a.py", strategy="data:via=arena", cluster=Cluster(device="cuda"))
    with pytest.raises(SpecError, match="spares"):
        Job(target="a.py", cluster=Cluster(device="cuda", spares=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="torch finds no GPU"):
        train(zygote, tmp_path, "cuda", 1)
