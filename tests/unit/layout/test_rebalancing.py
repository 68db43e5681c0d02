"""Rebalancing: balanced after servers came or went, and nothing moves without need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.layout import Parcel, place_shards, rebalance
from shoal.layout.rebalancing import WORTH_MOVING

sizes_and_owners = st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 4)), min_size=1, max_size=14)
some_servers = st.sets(st.integers(0, 6), min_size=1, max_size=5).map(sorted)


def moves(before: Sequence[int], after: Sequence[int]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


def loads(owners: Sequence[int], sizes: Sequence[int], capacities: Mapping[int, float]) -> dict[int, float]:
    """Bytes per capacity of every server."""
    totals = Counter[int]()
    for owner, size in zip(owners, sizes, strict=True):
        totals[owner] += size
    return {server: totals[server] / capacity for server, capacity in capacities.items()}


@given(sizes_and_owners, some_servers, st.data())
def test_no_single_move_would_help_afterwards(
    shards: list[tuple[int, int]], servers: list[int], data: st.DataObject
) -> None:
    sizes, owners = [size for size, _ in shards], [owner for _, owner in shards]
    capacities = {server: data.draw(st.sampled_from([1.0, 2.0, 3.5])) for server in servers}
    after = rebalance(owners, sizes, servers, capacities)
    assert set(after) <= set(servers)
    load = loads(after, sizes, capacities)
    worth = WORTH_MOVING * sum(sizes) / sum(capacities.values())
    for shard, size in enumerate(sizes):
        for taker in set(servers) - {after[shard]}:
            giver = after[shard]
            fuller = max(load[giver] - size / capacities[giver], load[taker] + size / capacities[taker])
            assert fuller > load[giver] - worth * 1.001
    assert rebalance(after, sizes, servers, capacities) == after, "nothing is left to do"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_equal_shards_take_the_fewest_moves(owners: list[int], servers: set[int]) -> None:
    after = rebalance(owners, [100] * len(owners), sorted(servers))
    even = [
        candidate
        for candidate in product(sorted(servers), repeat=len(owners))
        if max(map(candidate.count, servers)) - min(map(candidate.count, servers)) <= 1
    ]
    assert after in even
    assert moves(owners, after) == min(moves(owners, candidate) for candidate in even)


@given(st.integers(1, 6), st.integers(64 * 1024, 4 * 1024 * 1024), st.sampled_from(["size", "layer", "capacity"]))
def test_a_fresh_placement_stays_as_it_is(servers: int, numel: int, policy: str) -> None:
    parcels = [Parcel(name="weight", kind="Linear", numel=numel, itemsize=4)]
    capacities = {server: 1.0 + server for server in range(servers)} if policy == "capacity" else None
    given_capacities = list(capacities.values()) if capacities else ()
    placement = place_shards(parcels, servers=servers, policy=policy, capacities=given_capacities)
    after = rebalance(placement.owners, placement.shard_bytes, range(servers), capacities)
    assert after == placement.owners


def test_a_server_that_joins_takes_a_part_from_each():
    before = (0,) * 6 + (1,) * 6
    after = rebalance(before, [100] * 12, [0, 1, 2])
    assert moves(before, after) == 4
    assert Counter(after) == {0: 4, 1: 4, 2: 4}


def test_only_the_shards_of_a_server_that_leaves_move():
    before = (0,) * 4 + (1,) * 4 + (2,) * 4
    after = rebalance(before, [100] * 12, [0, 2])
    assert Counter(after) == {0: 6, 2: 6}
    assert [shard for shard in range(12) if after[shard] != before[shard]] == [4, 5, 6, 7]


def test_one_server_is_replaced_by_another():
    assert rebalance((0, 0, 1, 1), [100] * 4, [0, 5]) == (0, 0, 5, 5)


def test_one_large_shard_moves_rather_than_many_small_ones():
    assert rebalance((0, 0, 0, 0, 0), [400, 100, 100, 100, 100], [0, 1]) == (1, 0, 0, 0, 0)


def test_the_larger_server_gets_more():
    after = rebalance((0,) * 8, [100] * 8, [0, 1], {0: 1.0, 1: 3.0})
    assert Counter(after) == {0: 2, 1: 6}


def test_a_gain_too_small_to_matter_moves_nothing():
    owners = (0, 0, 1, 1)
    assert rebalance(owners, [1000, 3, 1000, 1], [0, 1]) == owners


def test_servers_without_capacity_or_no_servers_are_refused():
    with pytest.raises(SpecError, match="no server is left"):
        rebalance((0,), [1], [])
    with pytest.raises(SpecError, match="server 1 has no capacity"):
        rebalance((0,), [1], [0, 1], {0: 1.0})
