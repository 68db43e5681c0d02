"""Manifests as they are meant: their pods run, as namespaces of this machine, and train what one machine would."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.agents import run_on_hosts, spread_cluster
from helpers.pods import GUARD_S, Pod, running
from shoal.launch.manifests.kinds import documents
from shoal.launch.manifests.order import PodOrder
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.spec import Job

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"
STRATEGY = "ps:servers=2"


def wait_for(pods: list[Pod], is_so: Any) -> None:
    deadline = time.monotonic() + GUARD_S
    while not is_so():
        said = [pod.log.read_text()[-2000:] for pod in pods]
        assert time.monotonic() < deadline and all(pod.process.poll() in (None, 0) for pod in pods), said
        time.sleep(0.05)


@pytest.mark.long  # unit/launch/test_manifests.py holds what they are told to run
def test_pods_train_the_same_bits_as_hosts(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = PodOrder(
        name="digits",
        image="none",
        target=str(DIGITS),
        words=("--workers", "2", "--strategy", STRATEGY, "--max-steps", "60"),
        environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        runs=str(tmp_path / "runs"),
    )
    found = {one["kind"]: one for one in documents(order)}
    job = found["JobSet"]["spec"]["replicatedJobs"][0]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    subdomain = found["JobSet"]["spec"]["network"]["subdomain"]
    assert found["Service"]["metadata"]["name"] == subdomain
    names = [f"digits-{job['name']}-0-{index}.{subdomain}" for index in range(2)]
    with running([container] * 2, names, found["Secret"]["stringData"], tmp_path) as pods:
        first, second = pods
        wait_for(pods, lambda: "step 1/" in first.log.read_text())
        assert second.probe("readinessProbe").stdout == "joined\n"
        wait_for(pods, lambda: first.process.poll() is not None)
        probed = second.probe("readinessProbe")  # It has been sent away, and waits for another supervisor.
        assert probed.returncode == 1 and "takes part in no run yet" in probed.stderr
        assert second.probe("livenessProbe").stdout == "calling\n"
    results = json.loads((tmp_path / "runs" / "digits" / "result.json").read_text())
    assert results["audit"]["clean"] and results["steps"] == 60
    assert "on 2 hosts (pod-0, pod-1)" in first.log.read_text()
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)
    here = Job(
        target=str(DIGITS), strategy=STRATEGY, cluster=spread_cluster(workers=2), overrides={"max_steps": 60}
    )
    spread, _ = run_on_hosts(here, tmp_path / "here")
    assert results["digest"] == spread["digest"]
