"""Who sits where: hosts with more room have more workers, and copies are on other hosts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LaunchError
from shoal.layout import Demand, Seating, explain_seating, seat_all, seat_one, spread_backups
from shoal.spec.host_facts import HostFacts
from shoal.spec.vocabulary import Role

GIB = 1 << 30


def hosts(*cores: int, gpus: int = 0, memory_bytes: int = 0) -> list[HostFacts]:
    return [
        HostFacts(name=f"host{number}", cores=each, gpus=gpus, memory_bytes=memory_bytes)
        for number, each in enumerate(cores)
    ]


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ((4,), 3, (0, 0, 0)),
        ((2, 2), 4, (0, 0, 1, 1)),
        ((2, 6), 4, (0, 1, 1, 1)),
        ((1, 1, 1), 2, (0, 1)),
        ((8, 1), 2, (0, 0)),
    ],
)
def test_workers_follow_the_cores_in_neighbouring_ranks(
    cores: tuple[int, ...], workers: int, expected: tuple[int, ...]
) -> None:
    assert seat_all(hosts(*cores), Demand(workers=workers)).workers == expected


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 12))
def test_all_have_a_host_and_ranks_of_one_are_neighbours(cores: list[int], workers: int, servers: int) -> None:
    seating = seat_all(hosts(*cores), Demand(workers=workers, servers=servers))
    assert len(seating.workers) == workers and len(seating.servers) == servers
    assert list(seating.workers) == sorted(seating.workers)
    assert sum(seating.sizes(len(cores))) == workers
    held = Counter(seating.servers)
    assert max(held.values(), default=0) - min((held[host] for host in range(len(cores))), default=0) <= 1


@given(st.integers(2, 5), st.integers(2, 8), st.integers(1, 3))
def test_a_backup_is_never_on_its_owners_host(num_hosts: int, servers: int, each: int) -> None:
    seating = seat_all(hosts(*[2] * num_hosts), Demand(workers=1, servers=servers))
    owners = [server for server in range(servers) for _ in range(each)]
    backups = spread_backups(owners, range(servers), dict(enumerate(seating.servers)))
    for owner, backup in zip(owners, backups, strict=True):
        assert backup is not None and seating.servers[backup] != seating.servers[owner]


def test_on_one_host_backups_are_where_they_always_were() -> None:
    owners = [5, 5, 9, 7]
    assert spread_backups(owners, [9, 5, 7], {9: 0, 5: 0, 7: 0}) == spread_backups(owners, [9, 5, 7])


def test_gpus_are_not_shared() -> None:
    two = [HostFacts(name="a", cores=64, gpus=1), HostFacts(name="b", cores=2, gpus=3)]
    assert seat_all(two, Demand(workers=4, on_gpus=True)).workers == (0, 1, 1, 1)
    with pytest.raises(LaunchError, match="5 workers were asked for, but a, b have GPUs for 4"):
        seat_all(two, Demand(workers=5, on_gpus=True))


def test_memory_limits_a_host() -> None:
    two = [HostFacts(name="a", cores=8, memory_bytes=2 * GIB), HostFacts(name="b", cores=2, memory_bytes=8 * GIB)]
    assert seat_all(two, Demand(workers=5, memory_bytes=GIB)).workers == (0, 0, 1, 1, 1)
    with pytest.raises(LaunchError, match=r"memory \(1.0 GiB for each\) for 10; use fewer workers, or more hosts"):
        seat_all(two, Demand(workers=11, memory_bytes=GIB))


def test_a_successor_goes_where_it_is_least_crowded() -> None:
    left = dict(enumerate(hosts(2, 2, 4)))
    demand = Demand(workers=4)
    assert seat_one(left, {0: 1, 1: 1, 2: 1}, Role.WORKER, demand) == 2
    assert seat_one(left, {0: 0, 1: 1, 2: 2}, Role.WORKER, demand) == 0
    del left[2]
    assert seat_one(left, {0: 2, 1: 1}, Role.SERVER, demand) == 1


def test_better_crowded_than_nowhere() -> None:
    left = {1: HostFacts(name="b", cores=2, gpus=1)}
    assert seat_one(left, {1: 1}, Role.WORKER, Demand(workers=2, on_gpus=True)) == 1


def test_the_seating_is_explained() -> None:
    two = [HostFacts(name="a", address="10.0.0.1", cores=4), HostFacts(name="b", address="10.0.0.2", gpus=2)]
    lines = explain_seating(two, Seating(workers=(0, 0, 0), servers=(0, 1)))
    assert lines == [
        "a (10.0.0.1, 4 cores): workers 0-2, server 0, the coordinator",
        "b (10.0.0.2, 1 core, 2 GPUs): server 1",
    ]
