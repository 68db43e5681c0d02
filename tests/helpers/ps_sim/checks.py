"""What must be true after every run, whatever happened in it."""

from __future__ import annotations

from helpers.ps_sim.cluster import Cluster
from helpers.ps_sim.processes import rules_of
from helpers.ps_sim.scenario import WORKER, Scenario
from helpers.ps_sim.values import ChainValues, gradient
from shoal.ps.consistency import Mode
from shoal.ps.messages import NOBODY, Outcome, Push
from shoal.ps.shard import Shard


def check(cluster: Cluster) -> Cluster:
    """Every cell once in every shard, every acknowledgement true, every backup equal to its primary."""
    try:
        assert cluster.view is not None
        for shard, holders in enumerate(cluster.view.shard_views):
            primary = _copy(cluster, shard, holders.primary)
            _check_cells(cluster, shard, primary)
            if holders.backup != NOBODY:
                backup = _copy(cluster, shard, holders.backup)
                assert primary.values.digest() == backup.values.digest(), f"Shard {shard}: copies differ."
                assert primary.books() == backup.books(), f"Shard {shard}: books differ."
            if cluster.scenario.sync == "bsp" and not cluster.killed[WORKER] + cluster.deposed[WORKER]:
                expected = in_one_process(cluster.scenario, shard)
                assert primary.values.digest() == expected, f"Shard {shard} is not what one process computes."
    except AssertionError as error:
        raise cluster.failure(str(error)) from error
    return cluster


def in_one_process(scenario: Scenario, shard_number: int) -> str:
    """A shard's digest after synchronous training without a network."""
    shard = Shard(rules_of(scenario), ChainValues(shard_number))
    for step in range(1, scenario.steps + 1):
        version = shard.version
        for rank in range(scenario.workers):
            cells = [(step - 1) * scenario.workers + rank]
            push = Push(
                shard=shard_number,
                generation=1,
                origin=rank,
                sequence=step,
                rank=rank,
                clock=step,
                cells=cells,
                based_on=version,
                weight=1.0,
                loss=1.0 / step,
                frames=(gradient(shard_number, cells, version),),
            )
            shard.accept(push)
    return shard.values.digest()


def _copy(cluster: Cluster, shard: int, node: int) -> Shard:
    server = cluster.server(node)
    assert server is not None, f"Shard {shard}: node {node} is dead."
    duty = server.machine.held[shard]
    assert duty.shard is not None, f"Shard {shard}: node {node} was not filled."
    return duty.shard


def _check_cells(cluster: Cluster, number: int, shard: Shard) -> None:
    assert isinstance(shard.values, ChainValues)
    applied = sorted(shard.values.cells)
    everything = list(range(cluster.scenario.num_cells))
    told_applied = {cell for worker in cluster.workers for cell in worker.applied[number]}
    told_late = {cell for worker in cluster.workers for cell in worker.late[number]}
    if shard.rules.consistency.mode is Mode.QUORUM:
        assert len(applied) == len(set(applied)), f"Shard {number}: something was applied twice: {applied}"
        # A worker may die before it is told, and its successor be told the same again.
        late = shard.tally[Outcome.LATE.value]
        assert len(applied) + late >= len(everything), f"Shard {number}: {applied}, {late} late."
        assert not told_late & set(applied), f"Shard {number}: {told_late} were called late, {applied} applied."
    else:
        assert applied == everything, f"Shard {number}: every cell once was expected, found {applied}"
        assert not told_late, f"Shard {number}: {told_late} were called late."
    assert told_applied <= set(applied), f"Shard {number}: acknowledged and lost: {told_applied - set(applied)}"
    assert not shard.open_round
