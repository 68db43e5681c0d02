"""Shards in memory that outlives their servers: whoever dies, whenever, another goes on with what is there.

Nothing but the memory is left of a server that is killed: no backup, no other copy. After each run every cell
is in every shard exactly once, and in lockstep the values are those of one process.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scale, Scenario, SimulationFailed, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from helpers.ps_sim.values import ChainValues
from shoal.coordinator.moves import ShardMoves
from shoal.errors import LaunchError
from shoal.ps import primary

MODES = ("bsp", "asp", "ssp:1")
OTHER_MODES = ("alternate:2", "quorum:1/2", "ssp:2")
ALONE = Scenario(sync="bsp", servers=1, shards=1, steps=8)
TWO_ALONE = Scenario(sync="bsp", servers=2, replicas=0, shards=3, steps=6)


def kill_at_every_message(scenario: Scenario, *, rank: int = 0, amid: bool = False, every: int = 1) -> int:
    """One run for each message of an undisturbed one, or for some of them; returns how many there were."""
    calm = check(Cluster(scenario, seed=1).run())
    last = calm.network.sent if not amid else calm.network.sent // 2
    messages = range(calm.formed_at, last)
    for at in messages[::every]:
        kill = Kill(at=at, role=SERVER, rank=rank, amid=amid)
        cluster = check(Cluster(replace(scenario, kills=(kill,)), seed=1).run())
        assert cluster.killed == {SERVER: 1}
    return len(messages)


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("sync", [*MODES, *(pytest.param(mode, marks=pytest.mark.long) for mode in OTHER_MODES)])
def test_the_only_server_dies_at_every_message(sync: str, amid: bool) -> None:
    assert kill_at_every_message(replace(ALONE, sync=sync), amid=amid) >= 25


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("sync", [*MODES, *(pytest.param(mode, marks=pytest.mark.long) for mode in OTHER_MODES)])
def test_one_of_several_without_backups_dies_at_every_message(sync: str, amid: bool) -> None:
    assert kill_at_every_message(replace(TWO_ALONE, sync=sync), rank=1, amid=amid) >= 50


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_rounds_that_shards_close_together_outlive_their_servers(every: int) -> None:
    assert kill_at_every_message(replace(TWO_ALONE, together=True), amid=False, every=every) >= 100
    assert kill_at_every_message(replace(TWO_ALONE, together=True), amid=True, every=every) >= 50


def random_scenario(seed: int) -> Scenario:
    """Several deaths, of anybody, also in the middle of moves and of each other, on a bad network."""
    dice = random.Random(seed)
    servers, replicas = dice.choice([1, 1, 2, 3]), dice.choice([0, 1])
    seats = [
        (COORDINATOR, 0),
        (WORKER, 0),
        (WORKER, 1),
        *((SERVER, rank) for rank in range(servers) for _ in "ab"),
    ]
    kills = []
    for _ in range(dice.randint(1, 4)):
        role, rank = dice.choice(seats)
        # With backups, who follows a dead server may have nothing to update for long.
        amid = role == SERVER and dice.random() < 0.3 and (not replicas or servers == 1)
        kills.append(Kill(at=dice.randrange(10, 60 if amid else 160), role=role, rank=rank, amid=amid))
    more = dice.choice([0, 0, 0, 1, 2])
    return Scenario(
        sync=dice.choice([*MODES, *OTHER_MODES]),
        servers=servers,
        replicas=replicas,
        shards=servers + more + dice.choice([0, 2]),
        steps=8,
        kills=tuple(kills),
        scales=(Scale(dice.randrange(20, 150), servers + more),) if more else (),
        faults=NetFaults(
            drop=dice.choice([0, 0.05]), duplicate=dice.choice([0, 0.05]), delay=dice.choice([0, 0.1])
        ),
        together=dice.random() < 0.3,
    )


def run_random(seeds: range) -> None:
    killed = adopted = 0
    for seed in seeds:
        cluster = check(Cluster(random_scenario(seed), seed).run())
        assert cluster.killed.total() == len(cluster.scenario.kills)
        killed += cluster.killed[SERVER]
        adopted += cluster.killed[SERVER] > 0 and not cluster.scenario.replicas
    assert killed > len(seeds) / 2 and adopted > len(seeds) / 8


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_deaths(part: int) -> None:
    run_random(range(part * 100, (part + 1) * 100))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_random_deaths_many_times(part: int) -> None:
    run_random(range(10_000 + part * 500, 10_000 + (part + 1) * 500))


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_servers_die_while_shards_move(every: int) -> None:
    """Whoever it is, the shard's old server or its new one: the old place counts until the new one is filled."""
    scenario = Scenario(sync="bsp", servers=1, shards=4, steps=10, scales=(Scale(60, 3),))
    calm = check(Cluster(scenario, seed=1).run())
    assert calm.is_scaled
    struck, moments = 0, range(55, 200, every)
    for at in moments:
        kill = Kill(at=at, role=SERVER, rank=at % 3)
        cluster = check(Cluster(replace(scenario, kills=(kill,)), seed=1).run())
        struck += cluster.killed[SERVER]
    assert struck == len(moments)


def storm(seed: int) -> Cluster:
    """Servers become more and fewer again and again, and die in between, also newcomers that are not wanted."""
    dice = random.Random(seed)
    times = sorted(dice.randrange(20, 300) for _ in range(dice.randint(3, 8)))
    kills = [Kill(at=dice.randrange(20, 300), role=SERVER, rank=None) for _ in range(dice.randint(2, 6))]
    scenario = Scenario(
        sync=dice.choice(MODES),
        servers=dice.choice([1, 2]),
        shards=dice.choice([3, 6]),
        steps=20,
        scales=tuple(Scale(at, dice.randint(1, 3)) for at in times),
        kills=tuple(kills),
        waits_for_newcomers=True,
    )
    return check(Cluster(scenario, seed).run())


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 50))])
def test_servers_die_while_their_number_changes_again_and_again(part: int) -> None:
    clusters = [storm(seed) for seed in range(part * 40, (part + 1) * 40)]
    assert sum(cluster.killed[SERVER] for cluster in clusters) > 80


def test_the_simulation_finds_an_entry_that_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary, "note_entry", lambda shard, entry: None)
    with pytest.raises(SimulationFailed):
        kill_at_every_message(replace(ALONE, sync="asp"))


def test_the_simulation_finds_torn_values_that_are_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainValues, "resume", lambda self, facts: None)
    with pytest.raises(SimulationFailed, match="is not what one process computes"):
        kill_at_every_message(ALONE, amid=True)


BACKUP_TAKEN_AWAY = 838
"""A seed: a primary dies just after its filled backup was to make room for another, before it has heard of it."""


def test_a_primary_keeps_a_journal_before_its_backup_is_taken_away() -> None:
    scenario = random_scenario(BACKUP_TAKEN_AWAY)
    assert scenario.replicas and scenario.scales
    assert check(Cluster(scenario, BACKUP_TAKEN_AWAY).run()).killed == {SERVER: 1}


def test_the_simulation_finds_a_backup_that_is_taken_away_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardMoves, "_may_change", lambda self, table, shard: True)
    with pytest.raises(LaunchError, match="Nobody has all of shard"):
        Cluster(random_scenario(BACKUP_TAKEN_AWAY), BACKUP_TAKEN_AWAY).run()
