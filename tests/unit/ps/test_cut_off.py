"""A worker whose packets vanish: the coordinator loses patience, another takes its place, nothing counts twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scenario, check
from helpers.ps_sim.scenario import WORKER

ROUGH = NetFaults(drop=0.1, duplicate=0.1, delay=0.1, corrupt=0.05)
MODES = ["bsp", "asp", "ssp:1", "alternate:2", "quorum:1/2"]
ON_ROUGH_NETWORKS = ["bsp", "asp"]


@pytest.mark.parametrize(
    ("sync", "faults"),
    [
        *((sync, NetFaults()) for sync in MODES),
        *((sync, ROUGH) for sync in ON_ROUGH_NETWORKS),
        *(pytest.param(sync, ROUGH, marks=pytest.mark.long) for sync in MODES if sync not in ON_ROUGH_NETWORKS),
    ],
)
def test_a_worker_that_is_cut_off_is_given_up_and_replaced(sync, faults):
    scenario = Scenario(sync=sync, steps=8, faults=faults)
    calm = check(Cluster(scenario, seed=4).run())
    given_up = 0
    for at in range(calm.formed_at + 5, calm.network.sent * 3 // 4, 11):
        cut = Kill(at=at, role=WORKER, rank=1, cut_off=True)
        cluster = check(Cluster(replace(scenario, kills=(cut,)), seed=4).run())
        assert cluster.cut_off == {WORKER: 1}
        assert cluster.coordinator.finished["clean"]
        if len(cluster.workers) == 3:
            given_up += 1
            assert cluster.workers[-1].machine.rank == 1
            assert cluster.now > cluster.coordinator.plan.silent_after_s, "it has lost patience too early"
        else:  # It held no part of the data, and the other has trained on the rest.
            assert sync == "asp" and len(cluster.workers) == 2
    assert given_up > 3
