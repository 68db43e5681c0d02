"""`ps:sync=asp` on three hosts with networks of their own: links, hosts, processes fail, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.counting_task import SAMPLES
from helpers.havoc import Havoc
from helpers.namespaces import namespaced, network_of, run_in_namespaces, zygotes_in
from shoal.spec import Job

pytestmark = [pytest.mark.long, pytest.mark.alone]
WORKERS, SERVERS = 4, 3
SOAK_S = 600.0
FEW = ("server", "link", "coordinator's host")
MANY = (
    *("worker", "link", "server", "host", "coordinator", "link", "server", "coordinator's host", "worker", "link"),
    *("host", "server", "coordinator", "link", "worker", "coordinator's host", "server", "link", "host", "server"),
)


@pytest.mark.parametrize(
    ("faults", "seconds", "epochs"),
    [
        pytest.param(FEW, 0.0, 200, marks=pytest.mark.timeout(600), id="few"),
        pytest.param(MANY, SOAK_S, 1000, marks=pytest.mark.timeout(2400), id="many"),
    ],
)
def test_whatever_fails_each_sample_is_applied_once_per_epoch(
    tmp_path: Path, faults: tuple[str, ...], seconds: float, epochs: int
) -> None:
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": epochs, "pause_s": 0.2},
        strategy=f"ps:servers={SERVERS},sync=asp,standby=1",
        cluster=namespaced(workers=WORKERS, hosts=3),
        max_failures=1000,
    )
    shape = {"worker": WORKERS, "server": SERVERS}
    havoc = Havoc(tmp_path / "run", faults, shape=shape, every_s=seconds / len(faults))
    with network_of(3) as network, zygotes_in(network) as zygotes:
        try:
            results, _ = run_in_namespaces(
                job, tmp_path / "run", network, zygotes=zygotes, on_event=havoc.on_event
            )
        finally:
            havoc.close()
    assert havoc.done == Counter(faults), "each fault has happened"
    assert results["audit"]["clean"], results["audit"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {epochs: SAMPLES}
