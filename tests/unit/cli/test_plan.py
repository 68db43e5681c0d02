"""The plan of a run, from the sizes of a model."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.plan import Plan, make_plan
from shoal.spec import Cluster, Job

KIB = 1024
FACTS: dict[str, Any] = {
    "parcels": [
        {"name": "0.weight", "kind": "Linear", "numel": 192 * KIB, "itemsize": 4},
        {"name": "0.bias", "kind": "Linear", "numel": 64 * KIB, "itemsize": 4},
    ],
    "state_bytes": 2048 * KIB,
    "fixed_bytes": 10,
    "optimizer": "Adam",
    "num_samples": 640,
    "global_batch": 64,
    "total_steps": 30,
}


def plan(strategy: str, *, slots: int | None = None, **cluster: int) -> Plan:
    job = Job(target="digits.py", strategy=strategy, cluster=Cluster(**{"workers": 2, **cluster}), slots=slots)
    return make_plan(job, FACTS)


def held(found: Plan) -> list[tuple[int, int]]:
    return [(holding.times, holding.num_bytes) for holding in found.manner.memory]


def test_data_keeps_one_copy_and_a_gradient_for_each_slot() -> None:
    found = plan("data", slots=3)

    assert held(found) == [(1, 3072 * KIB), (3, 1024 * KIB), (2, 10)]
    assert "(1 + 2)" in found.manner.meaning and found.cells == 90
    assert found.placement_table == ""


def test_data_over_sockets_keeps_a_copy_for_each_worker() -> None:
    assert held(plan("data:via=ring")) == [(2, 3072 * KIB), (2, 1024 * KIB), (2, 10)]


def test_servers_keep_a_backup_and_say_who_holds_what() -> None:
    found = plan("ps:servers=2")

    assert held(found) == [(2, 3072 * KIB), (4, 1024 * KIB), (4, 1024 * KIB + 10)]
    assert found.memory_bytes == sum(times * num_bytes for times, num_bytes in held(found))
    assert found.placement_table.startswith("server") and "0.weight" in found.placement_table
    servers = found.to_dict()["servers"]
    assert [server["num_bytes"] for server in servers] == [512 * KIB, 512 * KIB]


@pytest.mark.parametrize(
    ("strategy", "pace"),
    [
        ("ps", "waits for all workers"),
        ("ps:sync=asp", "Nobody waits"),
        ("ps:sync=ssp:3", "more than 3 steps ahead"),
        ("ps:sync=alternate:4", "4 steps in which nobody waits"),
        ("ps:sync=quorum:1/2", "the first 1 of 2 pushes"),
    ],
)
def test_who_waits_for_whom(strategy: str, pace: str) -> None:
    assert pace in plan(strategy).manner.meaning


@pytest.mark.parametrize(
    ("strategy", "spares", "words"),
    [
        ("data", 0, "replaced by a fresh process"),
        ("data:via=ring", 0, "ends the run"),
        ("data", 1, "replaced by one of 1 spare"),
        ("ps:servers=2", 0, "followed by its backups"),
        ("ps:servers=2,replicas=0", 0, "A server that dies ends the run"),
        ("ps:servers=2,via=ring", 0, "A worker that dies ends the run"),
    ],
)
def test_what_happens_on_failure(strategy: str, spares: int, words: str) -> None:
    assert words in plan(strategy, spares=spares).manner.on_failure
