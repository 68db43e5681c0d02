"""What must be true after every run, whatever happened in it."""

from __future__ import annotations

from collections import Counter

from helpers.ps_sim.cluster import Cluster
from helpers.ps_sim.processes import rules_of
from helpers.ps_sim.scenario import WORKER, Scenario
from helpers.ps_sim.values import ChainValues, gradient
from shoal.ps.consistency import Mode, parse_sync
from shoal.ps.messages import NOBODY, Push
from shoal.ps.parts import own_part, settle_with_factor
from shoal.ps.shard import Shard


def check(cluster: Cluster) -> Cluster:
    """Every cell once in every shard, every acknowledgement true, every backup equal to its primary."""
    try:
        assert cluster.view is not None
        alone = in_one_process(cluster.scenario) if cluster.scenario.sync == "bsp" else []
        factors = set()
        for shard, holders in enumerate(cluster.view.shard_views):
            primary = _copy(cluster, shard, holders.primary)
            _check_cells(cluster, shard, primary)
            if holders.backup != NOBODY:
                backup = _copy(cluster, shard, holders.backup)
                assert primary.values.digest() == backup.values.digest(), f"Shard {shard}: copies differ."
                assert primary.books() == backup.books(), f"Shard {shard}: books differ."
            if cluster.scenario.sync == "bsp" and not cluster.killed[WORKER] + cluster.deposed[WORKER]:
                assert primary.values.digest() == alone[shard], f"Shard {shard} is not what one process computes."
            assert isinstance(primary.values, ChainValues)
            factors.add(tuple(primary.values.home.factors))
        assert len(factors) == 1, f"Shards closed their rounds with different numbers: {factors}"
        assert bool(*factors) == (cluster.scenario.together and _gathers(cluster.scenario))
        _check_saved(cluster)
    except AssertionError as error:
        raise cluster.failure(str(error)) from error
    return cluster


def _check_saved(cluster: Cluster) -> None:
    """Each checkpoint holds the steps that it says, in every shard, and none is older than the one before."""
    scenario, steps = cluster.scenario, [one.step for one in cluster.saved]
    for one in cluster.saved:
        expected = list(range(one.step * scenario.num_slots))
        assert all(cells == expected for cells in one.cells), (
            f"The checkpoint of step {one.step} holds {one.cells}."
        )
    assert steps == sorted(steps), f"A checkpoint was taken after a newer one: {steps}"
    if scenario.borders and scenario.leased:
        planned = [border // scenario.num_slots for border in scenario.borders]
        assert sorted(set(steps)) == planned, f"Checkpoints were planned after {planned}, taken after {steps}."


def in_one_process(scenario: Scenario) -> list[str]:
    """The shards' digests after synchronous training without a network."""
    shards = [Shard(rules_of(scenario), ChainValues(number)) for number in range(scenario.shards)]
    for step in range(1, scenario.steps + 1):
        for number, shard in enumerate(shards):
            version = shard.version
            for slot in range(scenario.num_slots):
                shard.accept(_push(scenario, number, step, slot, version))
        if scenario.together:
            parts = {number: own_part(shard, number) for number, shard in enumerate(shards)}
            for number, shard in enumerate(shards):
                shard.accept(settle_with_factor(shard, number, parts))
    return [shard.values.digest() for shard in shards]


def _push(scenario: Scenario, shard: int, step: int, slot: int, version: int) -> Push:
    cells = [(step - 1) * scenario.num_slots + slot]
    return Push(
        shard=shard,
        generation=1,
        origin=slot,
        sequence=step,
        clock_of=slot,
        clock=step,
        cells=cells,
        based_on=version,
        weight=1.0,
        loss=1.0 / step,
        half=[float(step)],
        found=[float(not scenario.spoilt.isdisjoint(cells))],
        frames=(gradient(shard, cells, version),),
    )


def _gathers(scenario: Scenario) -> bool:
    return parse_sync(scenario.sync).next_gathered(0) is not None


def _to_be_skipped(scenario: Scenario) -> set[int]:
    """The cells whose gradient is no number; with them, those of a round that needs them."""
    consistency, slots, cells = parse_sync(scenario.sync), scenario.num_slots, set(scenario.spoilt)
    for step in {cell // slots for cell in scenario.spoilt}:
        if consistency.gathers(step + 1):
            cells |= set(range(step * slots, (step + 1) * slots))
    return cells


def _copy(cluster: Cluster, shard: int, node: int) -> Shard:
    server = cluster.server(node)
    assert server is not None, f"Shard {shard}: node {node} is dead."
    duty = server.machine.held[shard]
    assert duty.shard is not None, f"Shard {shard}: node {node} was not filled."
    return duty.shard


def _check_cells(cluster: Cluster, number: int, shard: Shard) -> None:
    assert isinstance(shard.values, ChainValues)
    torn = shard.values.home.torn
    assert not torn, f"Shard {number}: torn gradients were taken for those of cells {torn}."
    applied = sorted(shard.values.home.cells)
    everything = list(range(cluster.scenario.num_cells))
    told_applied = {cell for worker in cluster.workers for cell in worker.applied[number]}
    told_late = {cell for worker in cluster.workers for cell in worker.late[number]}
    if shard.rules.consistency.mode is Mode.QUORUM:
        assert len(applied) == len(set(applied)), f"Shard {number}: something was applied twice: {applied}"
        # What is late may never be pushed: when all rounds are closed nobody waits for it.
        slots, (needed, _) = shard.rules.slots, shard.rules.consistency.quorum
        rounds = Counter(cell // slots for cell in applied)
        assert all(rounds[step] == needed for step in range(cluster.scenario.steps)), f"Shard {number}: {applied}"
        assert not told_late & set(applied), f"Shard {number}: {told_late} were called late, {applied} applied."
    else:
        assert applied == everything, f"Shard {number}: every cell once was expected, found {applied}"
        assert not told_late, f"Shard {number}: {told_late} were called late."
        skipped = set(shard.values.home.skipped)
        assert skipped == _to_be_skipped(cluster.scenario), f"Shard {number}: {skipped} were not applied."
    assert told_applied <= set(applied), f"Shard {number}: acknowledged and lost: {told_applied - set(applied)}"
    assert not shard.open_round
