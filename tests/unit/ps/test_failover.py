"""Fail-over, proven by simulation: deaths at every message, and thousands of runs on a bad network.

After each run every cell is in every shard exactly once, every acknowledged push among them, every backup equals
its primary in values and books, and whoever died has been replaced. A failing run prints what repeats it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from helpers.ps_sim import Cluster, Kill, NetFaults, Scale, Scenario, SimulationFailed, check
from helpers.ps_sim.scenario import COORDINATOR, SERVER, WORKER
from shoal.coordinator.shards import ShardTable
from shoal.ps.link import ShardLink
from shoal.ps.primary import Primary
from shoal.ps.settlement import AllToAll

MODES = ("bsp", "asp", "ssp:1")
OTHER_MODES = ("alternate:2", "quorum:1/2", "ssp:2")
VICTIMS = ((SERVER, 0), (SERVER, 1), (COORDINATOR, 0))
SEEDS_PER_TEST = 175
SPARSE = 3
"""Where all tests must be quick, every so many-th message is a death's moment; elsewhere each is."""
ROUGH = NetFaults(drop=0.1, duplicate=0.1, delay=0.1, corrupt=0.05)


def kill_at_messages(
    sync: str, role: str, rank: int, *, lives_on: bool = False, together: bool = False, every: int = 1
) -> int:
    """One run for each message of an undisturbed one, or for some of them; returns how many there were."""
    scenario = Scenario(sync=sync, together=together)
    calm = check(Cluster(scenario, seed=1).run())
    messages = range(1 if role == COORDINATOR else calm.formed_at, calm.network.sent)
    for at in messages[::every]:
        kill = Kill(at=at, role=role, rank=rank, lives_on=lives_on)
        cluster = check(Cluster(replace(scenario, kills=(kill,)), seed=1).run())
        assert (cluster.deposed if lives_on else cluster.killed) == {role: 1}
    return len(messages)


@pytest.mark.parametrize(("role", "rank"), VICTIMS)
@pytest.mark.parametrize("sync", MODES)
def test_a_death_at_many_messages(sync, role, rank):
    assert kill_at_messages(sync, role, rank, every=SPARSE) >= 90


def test_a_death_at_many_messages_of_rounds_that_shards_close_together():
    assert kill_at_messages("bsp", SERVER, 0, together=True, every=SPARSE) >= 150


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize(("role", "rank"), [*VICTIMS, (WORKER, 0), (WORKER, 1)])
@pytest.mark.parametrize("sync", [*MODES, *OTHER_MODES])
def test_a_death_at_every_message_of_every_kind(sync, role, rank, lives_on, together):
    assert kill_at_messages(sync, role, rank, lives_on=lives_on, together=together) >= 90


def random_scenario(seed: int) -> Scenario:
    """A job, up to three deaths and a network, as the seed will."""
    dice = random.Random(seed)
    victims = [*VICTIMS, (WORKER, 0), (WORKER, 1)]
    kills = []
    for _ in range(dice.randint(0, 3)):
        role, rank = dice.choice(victims)
        kills.append(Kill(at=dice.randrange(10, 220), role=role, rank=rank, lives_on=dice.random() < 0.4))
    # A host knows who of its own lives: nobody goes on there who is taken for dead.
    on_one_host = not any(kill.lives_on and kill.role != COORDINATOR for kill in kills)
    return Scenario(
        sync=dice.choice([*MODES, *OTHER_MODES]),
        shards=dice.choice([1, 2, 3]),
        kills=tuple(kills),
        faults=NetFaults(
            drop=dice.choice([0, 0.02, 0.1]),
            duplicate=dice.choice([0, 0.05, 0.1]),
            delay=dice.choice([0, 0.05, 0.2]),
            corrupt=dice.choice([0, 0.02]),
        ),
        together=dice.random() < 0.4,
        in_memory=on_one_host and dice.random() < 0.5,
        save_every=dice.choice([0, 2]) if on_one_host else 0,
        saves_on_demand=dice.random() < 0.5,
    )


def run_random(seeds: range) -> None:
    struck: Counter[str] = Counter()
    for seed in seeds:
        cluster = check(Cluster(random_scenario(seed), seed).run())
        assert cluster.killed.total() + cluster.deposed.total() == len(cluster.scenario.kills)
        struck += cluster.network.injected + cluster.killed
        struck += Counter({f"deposed {role}": count for role, count in cluster.deposed.items()})
    for fault in ("drop", "duplicate", "delay", "corrupt"):
        assert struck[fault] > len(seeds)
    for role in (SERVER, WORKER, COORDINATOR):
        assert struck[role] > len(seeds) / 20
        assert struck[f"deposed {role}"] > len(seeds) / 40


@pytest.mark.parametrize(
    "part", [*range(2), *(pytest.param(part, marks=pytest.mark.long) for part in range(2, 10))]
)
def test_random_faults_and_deaths(part):
    run_random(range(part * SEEDS_PER_TEST, (part + 1) * SEEDS_PER_TEST))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_ten_times_as_many(part):
    run_random(range(100_000 + part * 1000, 100_000 + (part + 1) * 1000))


def test_the_dead_may_be_let_in_before_who_follows_them():
    """Here a dead worker's last words reach the coordinator's successor, which dies before it notices."""
    cluster = check(Cluster(random_scenario(408), 408).run())
    assert cluster.killed == {COORDINATOR: 1, WORKER: 1} and cluster.deposed == {COORDINATOR: 1}
    assert len(cluster.workers) == 3, "one follows one"


@pytest.mark.parametrize("sync", [*MODES, *OTHER_MODES])
def test_one_seed_is_one_run(sync):
    kills = (Kill(at=60, role=SERVER), Kill(at=90, role=COORDINATOR), Kill(at=150, role=WORKER, rank=1))
    scenario = Scenario(sync=sync, kills=kills, faults=ROUGH)
    runs = [check(Cluster(scenario, seed=7).run()) for _ in range(2)]
    other = check(Cluster(scenario, seed=8).run())
    assert list(runs[0].network.trace) == list(runs[1].network.trace) != list(other.network.trace)
    assert (runs[0].now, runs[0].network.sent) == (runs[1].now, runs[1].network.sent)
    assert runs[0].network.injected == runs[1].network.injected
    assert runs[0].killed == {SERVER: 1, COORDINATOR: 1, WORKER: 1}


@pytest.mark.parametrize("sync", [*MODES, *OTHER_MODES])
def test_messages_as_bytes_change_nothing(sync):
    kills = (Kill(at=60, role=SERVER, rank=1), Kill(at=120, role=COORDINATOR))
    plain = check(Cluster(Scenario(sync=sync, kills=kills, faults=ROUGH), seed=3).run())
    as_bytes = Scenario(sync=sync, kills=kills, faults=ROUGH, through_codec=True)
    encoded = check(Cluster(as_bytes, seed=3).run())
    assert encoded.killed == {SERVER: 1, COORDINATOR: 1}
    assert (encoded.network.sent, encoded.now) == (plain.network.sent, plain.now)


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2"])
def test_more_of_everything(sync):
    kills = (Kill(at=150, role=SERVER, rank=2), Kill(at=400, role=SERVER, rank=0), Kill(at=500, role=WORKER))
    cluster = Cluster(
        Scenario(sync=sync, servers=3, workers=4, shards=5, steps=8, kills=kills, faults=ROUGH), seed=5
    )
    assert check(cluster.run()).killed == {SERVER: 2, WORKER: 1}
    assert all(cluster.network.injected[fault] for fault in ("drop", "duplicate", "delay", "corrupt"))


def scaled(seed: int) -> Cluster:
    """A run whose servers become more or fewer on the way, while workers and coordinators die."""
    dice = random.Random(seed)
    scenario = random_scenario(seed)
    before, after = dice.choice([(2, 3), (3, 2), (2, 4)])
    # A shard that moves has one copy while it is filled at its new place: servers must not die meanwhile.
    kills = tuple(kill for kill in scenario.kills if kill.role != SERVER)
    scenario = replace(scenario, servers=before, shards=dice.choice([2, 4]), kills=kills)
    scenario = replace(scenario, scales=(Scale(dice.randrange(20, 180), after),))
    return check(Cluster(scenario, seed).run())


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_shards_move_while_training_goes_on(part):
    clusters = [scaled(seed) for seed in range(part * 60, (part + 1) * 60)]
    assert all(cluster.is_scaled for cluster in clusters)
    moved = [
        cluster
        for cluster in clusters
        if cluster.view and {row[1] for row in cluster.view.shards} - set(range(1, cluster.scenario.servers + 1))
    ]
    assert len(moved) > 10
    assert sum(cluster.killed.total() for cluster in clusters) > 10


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_shards_move_ten_times_as_often(part):
    assert all(scaled(seed).is_scaled for seed in range(10_000 + part * 150, 10_000 + (part + 1) * 150))


def test_a_single_server_needs_no_backup():
    cluster = check(Cluster(Scenario(sync="asp", servers=1, faults=ROUGH), seed=2).run())
    assert cluster.network.injected["drop"]


def test_the_simulation_finds_a_server_that_answers_too_early(monkeypatch):
    """The proof is worth what it would notice: acknowledge before the backup has it, and an update gets lost."""
    monkeypatch.setattr(Primary, "_reply", lambda self, node, message: self._send(node, message))
    with pytest.raises(SimulationFailed, match=r"(?s)Repeat: Cluster\(Scenario\(.*seed=\d+\).* -> "):
        run_random(range(SEEDS_PER_TEST))


def test_the_simulation_finds_a_part_that_is_told_too_early(monkeypatch):
    """Told before the backup has the round, it may be of a round that never was."""
    begin = AllToAll.__init__
    monkeypatch.setattr(
        AllToAll,
        "__init__",
        lambda self, number, shard, tell, patience_s: begin(self, number, shard, tell.__self__._send, patience_s),
    )
    with pytest.raises(SimulationFailed, match="closed their rounds with different numbers"):
        for seed in range(300):
            faults = NetFaults(drop=0.1, delay=0.2)
            kills = (Kill(at=20 + seed, role=SERVER, rank=seed % 2, lives_on=True),)
            check(Cluster(Scenario(sync="quorum:1/2", kills=kills, faults=faults, together=True), seed).run())


def kill_while_views_are_late(*, together: bool) -> None:
    """Workers may hear the new primary before they know that it is one."""
    for at in range(30, 130):
        kill = Kill(at=at, role=SERVER, rank=at % 2)
        scenario = Scenario(sync="bsp", kills=(kill,), faults=NetFaults(delay=0.3), together=together)
        assert check(Cluster(scenario, seed=at).run()).killed == {SERVER: 1}


@pytest.mark.parametrize("together", [False, True])
def test_no_worker_reads_the_copy_of_a_dead_primary(together):
    kill_while_views_are_late(together=together)


def test_the_simulation_finds_news_that_are_believed_too_early(monkeypatch):
    monkeypatch.setattr(ShardLink, "knows", lambda self, generation: self.holders is not None)
    with pytest.raises(SimulationFailed, match="is not what one process computes"):
        kill_while_views_are_late(together=False)


def test_the_simulation_finds_a_shard_that_does_not_stand_still(monkeypatch):
    monkeypatch.setattr(Primary, "_postponed", lambda self, sender, message, key: False)
    with pytest.raises(SimulationFailed):
        run_random(range(SEEDS_PER_TEST))


def move_while_views_are_late(seeds: range) -> None:
    """Whoever held a place may hear late that another has it now."""
    for seed in seeds:
        scenario = Scenario(
            sync=("bsp", "asp")[seed % 2],
            shards=4,
            steps=12,
            scales=(Scale(40 + seed // 2, 3),),
            faults=NetFaults(delay=0.3),
        )
        assert check(Cluster(scenario, seed // 2).run()).is_scaled


def test_no_place_has_two_holders():
    move_while_views_are_late(range(40))


def test_the_simulation_finds_a_place_that_is_handed_on_too_early(monkeypatch):
    monkeypatch.setattr(ShardTable, "may_back", lambda self, shard, node: True)
    with pytest.raises(SimulationFailed, match="every cell once was expected"):
        move_while_views_are_late(range(400))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_no_place_ever_has_two_holders(part):
    move_while_views_are_late(range(part * 200, (part + 1) * 200))
