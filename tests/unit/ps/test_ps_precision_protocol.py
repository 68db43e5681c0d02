"""Gradients that are no numbers: taken once by every shard, applied by none, whoever dies meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.ps_pushes import Recorder, make_push, make_shard
from helpers.ps_sim import Cluster, Kill, NetFaults, Scenario, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from shoal.ps.shard import Shard

ROUGH = NetFaults(drop=0.1, duplicate=0.1, delay=0.1, corrupt=0.05)
SOUND, SPOILT = [0.0, 3.0], [2.0, 4.0]


def applied(shard: Shard) -> list[list[list[int]]]:
    assert isinstance(shard.values, Recorder)
    return [cells for cells, _ in shard.values.calls]


def test_a_round_that_needs_all_is_skipped_for_one_and_told():
    shard = make_shard("bsp")
    shard.accept(make_push(0, half=[8.0], found=SOUND))
    shard.accept(make_push(1, half=[8.0], found=SPOILT, loss=6.0))
    assert applied(shard) == []
    assert (shard.rounds, shard.version, shard.loss, shard.tally["cells"]) == (1, 1, 4.0, 2)
    assert (shard.half, shard.found) == ([8.0], [2.0, 7.0])
    for cell in (2, 3):
        shard.accept(make_push(cell, half=[4.0], found=SOUND, scale=0.25))
    assert applied(shard) == [[[2], [3]]]
    assert (shard.half, shard.found) == ([4.0], [0.0, 6.0])
    assert isinstance(shard.values, Recorder)
    assert shard.values.calls[0][1]["scale"] == 0.25


def test_a_quorum_leaves_out_what_is_no_number():
    shard = make_shard("quorum:2/3", slots=3)
    shard.accept(make_push(0, slots=3, scaled=False, weight=4.0, found=SOUND))
    shard.accept(make_push(1, slots=3, scaled=False, weight=2.0, found=SPOILT))
    assert applied(shard) == [[[0]]]
    assert isinstance(shard.values, Recorder)
    assert shard.values.calls[0][1]["scale"] == 1 / 4.0
    assert (0 in shard.cells, 1 in shard.cells) == (True, True)


@pytest.mark.parametrize("sync", ["asp", "ssp:1"])
def test_what_is_no_number_disturbs_nobody_else(sync):
    shard = make_shard(sync)
    shard.accept(make_push(0, found=SPOILT))
    shard.accept(make_push(1, found=SOUND))
    assert applied(shard) == [[[1]]]
    assert (shard.version, shard.tally["cells"], shard.floor) == (2, 2, 1)


def test_a_new_backup_knows_the_scale():
    shard = make_shard("bsp")
    for cell in (0, 1):
        shard.accept(make_push(cell, half=[8.0, 1.0], found=SPOILT))
    frames, books = shard.books()
    copy = Shard.from_books(shard.rules, Recorder(0), frames, books)
    assert (copy.half, copy.found) == ([8.0, 1.0], [4.0, 8.0])


def test_a_death_at_every_message():
    kill_at_every_message("bsp", SERVER, together=False, lives_on=False)


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize("role", [SERVER, COORDINATOR, WORKER])
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:1", "alternate:2"])
def test_a_death_at_every_message_of_every_kind(sync, role, together, lives_on):
    kill_at_every_message(sync, role, together=together, lives_on=lives_on)


@pytest.mark.parametrize("sync", ["bsp", "asp", "alternate:2"])
def test_a_bad_network(sync):
    scenario = Scenario(sync=sync, spoilt=frozenset({3, 4}), faults=ROUGH, through_codec=True)
    for seed in range(3):
        check(Cluster(scenario, seed=seed).run())


def kill_at_every_message(sync: str, role: str, *, together: bool, lives_on: bool) -> None:
    scenario = Scenario(sync=sync, steps=3, spoilt=frozenset({3}), together=together)
    calm = check(Cluster(scenario, seed=1).run())
    for at in range(1 if role == COORDINATOR else calm.formed_at, calm.network.sent):
        kill = Kill(at=at, role=role, lives_on=lives_on)
        check(Cluster(replace(scenario, kills=(kill,)), seed=1).run())
