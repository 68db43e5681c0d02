"""The benchmark's runs under faults, with real processes."""

from dataclasses import replace

import pytest

from benchmarks import chaos, torchrun_peer
from benchmarks.recorded import record
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess

STEPS = 32
"""Whole epochs, so that every sample is applied equally often."""


def test_a_kill_is_found_in_the_timeline(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)  # nothing here depends on how long a start takes
    scenario = chaos.SCENARIOS[0]
    calm = record(scenario.job(STEPS))
    stormy = record(replace(scenario.job(STEPS), chaos="kill worker:0 at step 10; kill worker:1 at step 20"))
    found = chaos.assess(scenario, calm, stormy, calm)
    assert found.faults == {"kill": 2} and found.has_same_bits and found.is_count_exact
    assert [outage.kind for outage in found.outages] == ["kill", "kill"]
    assert all(outage.to_next_step_s > 0 for outage in found.outages)
    # Nothing is missing in it, whoever was killed.
    assert [samples for _, samples in stormy.timeline] == [samples for _, samples in calm.timeline]


@pytest.mark.alone
@pytest.mark.long
def test_torchrun_goes_on_after_a_kill():
    session = torchrun_peer.train(seconds=60.0, every_s=15.0)
    found = torchrun_peer.assess([session], session)
    assert found.faults["kill"] >= 1
    assert len(found.outages) >= 1, "no step was taken after a kill"
    assert found.longest_to_next_step_s > 0
