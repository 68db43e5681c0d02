"""`data` over hosts with networks of their own: a link is cut and healed, a host is gone for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Network
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.namespaces import NamespaceStarter, namespaced, network_of, run_in_namespaces
from shoal.observe import Event
from shoal.spec import Job

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
EPOCHS = 200


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_of(3) as made:
        yield made


def counted(tmp_path: Path) -> Job:
    return Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": EPOCHS, "pause_s": 0.02},
        cluster=namespaced(workers=3, hosts=3),
    )


def test_a_link_that_is_cut_and_healed(network: Network, tmp_path: Path) -> None:
    """The others go on; the host that was cut off ends its processes, and comes back when it can."""
    cut = []

    def strike(event: Event, starter: NamespaceStarter) -> None:
        if event.kind == "steps" and not cut:
            cut.append("host-1")
            network.cut(starter.host("host-1"))
        elif event.kind == "replaced":
            network.heal(starter.host("host-1"))
        elif event.kind == "scaled":
            (tmp_path / "hurry").touch()

    results, events = run_in_namespaces(counted(tmp_path), tmp_path / "run", network, on_event=strike)
    told = [event.kind for event in events if event.kind in ("host", "replaced", "host_added", "scaled")]
    assert told == ["host", "replaced", "host_added", "scaled"]
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {EPOCHS: 256}


@pytest.mark.parametrize("victim", ["host-0", "host-2"])
def test_a_host_that_is_gone_for_good(victim: str, network: Network, tmp_path: Path) -> None:
    gone = []

    def strike(event: Event, starter: NamespaceStarter) -> None:
        if event.kind == "steps" and not gone:
            gone.append(victim)
            starter.kill(victim)
        elif event.kind == "replaced":
            (tmp_path / "hurry").touch()

    try:
        results, _ = run_in_namespaces(counted(tmp_path), tmp_path / "run", network, on_event=strike)
    finally:
        network.heal(network.hosts[int(victim[-1])])
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {EPOCHS: 256}
