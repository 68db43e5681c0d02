"""Checkpoints while members of every role die: each holds what it says, and none is older than the last."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scenario, SimulationFailed, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from shoal.coordinator.machine import Coordinator
from shoal.strategies.ps.holding import Hold

RANKED = ("ssp:1", "ssp:3", "alternate:2")
VICTIMS = ((SERVER, 0), (SERVER, 1), (COORDINATOR, 0), (WORKER, 0), (WORKER, 1))


def saving(seed: int, *, on_demand: bool, sync: str = "asp") -> Scenario:
    dice = random.Random(seed)
    kills = []
    for _ in range(dice.randint(1, 3)):
        role, rank = dice.choice(VICTIMS)
        kills.append(Kill(at=dice.randrange(40, 400), role=role, rank=rank))
    return Scenario(
        sync=sync,
        steps=12,
        shards=dice.choice([1, 2]),
        kills=tuple(kills),
        save_every=dice.choice([2, 3]),
        saves_on_demand=on_demand,
        faults=dice.choice([NetFaults(), NetFaults(drop=0.02, delay=0.1)]),
    )


def save_under_fire(seeds: range, *, on_demand: bool, syncs: tuple[str, ...] = ("asp",)) -> None:
    struck, saved = Counter[str](), 0
    for seed in seeds:
        scenario = saving(seed, on_demand=on_demand, sync=syncs[seed % len(syncs)])
        cluster = check(Cluster(scenario, seed).run())
        struck += cluster.killed
        saved += len(cluster.saved)
    assert saved > len(seeds)
    for role in (SERVER, WORKER, COORDINATOR):
        assert struck[role] > len(seeds) / 5


def test_what_is_asked_for_is_saved_as_it_was():
    save_under_fire(range(50), on_demand=True)


def test_what_is_planned_is_saved_at_its_step_whoever_dies():
    save_under_fire(range(50), on_demand=False)


def test_ranks_with_cells_of_their_own_meet_at_one_border():
    save_under_fire(range(75), on_demand=True, syncs=RANKED)


def test_a_border_is_past_what_a_dead_worker_has_pushed_to_some_shards():
    """The seed that found it."""
    check(Cluster(saving(1512, on_demand=True, sync="ssp:1"), 1512).run())


@pytest.mark.long
@pytest.mark.parametrize("on_demand", [True, False])
def test_twenty_times_as_many(on_demand):
    save_under_fire(range(50, 1050), on_demand=on_demand)


@pytest.mark.long
def test_twenty_times_as_many_with_cells_of_their_own():
    save_under_fire(range(75, 1575), on_demand=True, syncs=RANKED)


def test_the_simulation_finds_a_border_below_what_is_done(monkeypatch):
    """A coordinator that takes over and lets all meet before it knows how far they are: at a step behind them."""
    monkeypatch.setattr(Coordinator, "_knows_how_far", True)
    monkeypatch.setattr(Hold, "is_exact", lambda self, cells: True)
    with pytest.raises(SimulationFailed, match=r"The checkpoint of step \d+ holds"):
        save_under_fire(range(20), on_demand=True)
