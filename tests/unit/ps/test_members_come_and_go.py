"""Workers join and leave in every mode, proven by simulation: their slots change hands, and nothing else changes.

After each run every cell is in every shard exactly once, and in lockstep every bit is that of one process that
computes the same slots, however many there were to fill them. A failing run prints what repeats it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scale, Scenario, SimulationFailed, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from shoal.coordinator.dealing import SlotDeal
from shoal.ps.dealing import SlotHolder
from shoal.ps.messages import NOBODY

MODES = ("bsp", "ssp:1", "ssp:3", "alternate:2", "quorum:3/4", "quorum:2/4")
SLOTS = 4
SEEDS_PER_TEST = 30


def elastic_scenario(seed: int) -> Scenario:
    """A job that has up to four changes of the number of its workers, deaths and a network, as the seed will."""
    dice = random.Random(seed)
    scales = [
        Scale(at, workers=dice.randint(1, SLOTS)) for at in sorted(dice.sample(range(30, 500), dice.randint(1, 4)))
    ]
    kills = [
        Kill(at=dice.randrange(20, 500), role=role, rank=None if role == WORKER else 0, lives_on=lives_on)
        for role, lives_on in dice.choices(
            [(WORKER, False), (WORKER, True), (SERVER, False), (COORDINATOR, False), (COORDINATOR, True)],
            k=dice.choice((0, 0, 1, 2, 3)),
        )
    ]
    on_one_host = not any(kill.lives_on and kill.role != COORDINATOR for kill in kills)
    return Scenario(
        sync=dice.choice(MODES),
        workers=dice.randint(1, SLOTS),
        slots=SLOTS,
        shards=dice.choice((1, 2, 3)),
        steps=10,
        kills=tuple(kills),
        scales=tuple(scales),
        faults=NetFaults(
            drop=dice.choice((0, 0.02, 0.1)),
            duplicate=dice.choice((0, 0.1)),
            delay=dice.choice((0, 0.05, 0.2)),
            corrupt=dice.choice((0, 0.02)),
        ),
        together=dice.random() < 0.3,
        in_memory=on_one_host and dice.random() < 0.5,
        save_every=dice.choice((0, 2)) if on_one_host else 0,
        saves_on_demand=True,
    )


def run_elastic(seeds: range) -> None:
    struck: Counter[str] = Counter()
    for seed in seeds:
        cluster = check(Cluster(elastic_scenario(seed), seed).run())
        assert cluster.is_scaled and cluster.killed.total() + cluster.deposed.total() == len(
            cluster.scenario.kills
        )
        struck += Counter(cluster.scenario.sync for _ in cluster.scenario.scales)
        struck["hands"] += sum(life for _, life in cluster.view.settings["deal"]["slots"])
        struck["saved"] += len(cluster.saved)
        struck += cluster.killed
    assert all(struck[mode] for mode in (*MODES, "saved", WORKER, SERVER, COORDINATOR))
    assert struck["hands"] > len(seeds), "slots have changed hands"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 40))])
def test_workers_come_and_go(part):
    run_elastic(range(part * SEEDS_PER_TEST, (part + 1) * SEEDS_PER_TEST))


def test_the_simulation_finds_a_slot_that_is_handed_on_too_early(monkeypatch):
    def hand_on(self: SlotDeal, slot: int, node: int, coming: int, *, may_recall: bool) -> None:
        owner, lives, _ = self._rows[slot]
        if node not in (NOBODY, owner):
            self._rows[slot] = [node, lives + 1, coming]

    monkeypatch.setattr(SlotDeal, "_aim", hand_on)
    with pytest.raises(SimulationFailed, match="A slot is in two hands"):
        run_elastic(range(SEEDS_PER_TEST))


@pytest.mark.long
def test_the_simulation_finds_a_new_owner_that_leaves_a_step_out(monkeypatch):
    def next_clock(self: SlotHolder, slot: int, completed, at_least: int) -> int:
        return 1 + max(self._done.get(slot, 0), completed(slot) + (slot in self._fresh))

    monkeypatch.setattr(SlotHolder, "_next_clock", next_clock)
    with pytest.raises(SimulationFailed):
        run_elastic(range(SEEDS_PER_TEST))


@pytest.mark.parametrize("sync", MODES)
def test_messages_as_bytes_change_nothing(sync):
    scales = (Scale(60, workers=4), Scale(200, workers=1))
    plain = Scenario(sync=sync, workers=2, slots=SLOTS, steps=8, scales=scales)
    runs = [check(Cluster(scenario, seed=3).run()) for scenario in (plain, replace(plain, through_codec=True))]
    assert runs[0].is_scaled and (runs[0].network.sent, runs[0].now) == (runs[1].network.sent, runs[1].now)
