"""Which strategy evaluates a saved model, and with how many workers: what the run had, unless somebody says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.launch.saved import _saved_job
from shoal.spec import Cluster, Job


def saved(tmp_path: Path, strategy: str, cluster: Cluster) -> Path:
    """The folder of a run, as far as it takes to know how to go on with its model."""
    (tmp_path / "job.json").write_text(Job(target="a:task", strategy=strategy, cluster=cluster).to_json())
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("trained", "said", "found"),
    [
        # Each has the whole model: how it was trained does not matter, and one worker is enough.
        ("data:shares=1+2+1", {}, ("data", 1, "")),
        ("data:partition=relay", {}, ("data", 1, "")),
        ("data:via=ring", {"cluster": {"workers": 2}}, ("data:via=ring", 2, "")),
        ("ps:servers=2,sync=asp", {}, ("data", 1, "")),
        ("layer:phases=2", {}, ("data", 1, "")),
        ("data", {"strategy": "ps"}, ("data", 1, "")),
        # Each has a part: as many as before, which may use as much.
        ("sharded", {}, ("sharded", 3, "1GiB")),
        ("pipeline:split=1+2+1", {"cluster": {"device": "cpu"}}, ("pipeline:split=1+2+1", 3, "1GiB")),
        ("layer:place=a@0+b@2", {}, ("layer:place=a@0+b@2", 3, "1GiB")),
        ("data", {"strategy": "tensor"}, ("tensor", 3, "1GiB")),
        # Who says how many says also what they may use.
        ("sharded", {"cluster": {"workers": 2}}, ("sharded", 2, "")),
        ("sharded", {"cluster": {"memory": "2GiB"}}, ("sharded", 3, "2GiB")),
        ("sharded", {"cluster": {"device": "cuda"}}, ("sharded", 3, "")),
        ("sharded", {"strategy": "data"}, ("data", 1, "")),
    ],
)
def test_a_run_is_read_as_it_was_trained(
    tmp_path: Path, trained: str, said: dict[str, Any], found: tuple[str, int, str]
) -> None:
    folder = saved(tmp_path, trained, Cluster(workers=3, memory="1GiB"))
    job = _saved_job(
        "evaluate", folder, said.get("strategy"), said.get("cluster", {}), {"data": "test"}, trust=True
    )
    assert (job.strategy, job.cluster.workers, job.cluster.memory) == found
    assert job.options == {"from": str(folder / "model.safetensors"), "data": "test"}
    assert not job.conduct.servers
