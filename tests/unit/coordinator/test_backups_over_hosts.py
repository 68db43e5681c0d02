"""A backup is not on its primary's host, from the first view on and after losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HOSTS = {10: 0, 11: 0, 12: 1, 13: 1}
"""By node: servers 0 and 1 are on the first host, 2 and 3 on the second."""


@pytest.fixture
def spread_job(make_job: Callable[..., Any]) -> Any:
    job = make_job(servers=4, owners=(0, 1, 2, 3), backups=(1, 2, 3, 0))
    for node, host in HOSTS.items():
        job.join(node, "server", node - 10, host)
    for rank in range(2):
        job.join(20 + rank, "worker", rank)
    job.clear()
    return job


def are_apart(job: Any, hosts: dict[int, int]) -> bool:
    return all(hosts[shard.primary] != hosts[shard.backup] for shard in job.shards)


def test_the_first_backups_are_on_other_hosts(spread_job: Any) -> None:
    assert are_apart(spread_job, HOSTS)
    assert all(shard.filled for shard in spread_job.shards)


def test_a_new_backup_is_on_another_host_though_others_hold_less(spread_job: Any) -> None:
    backed = next(shard for shard in spread_job.shards if shard.backup == 12)
    assert HOSTS[backed.primary] == 0
    spread_job.lose(12)
    spread_job.fill(*(number for number, shard in enumerate(spread_job.shards) if shard.backup >= 0))
    assert all(shard.primary != 12 for shard in spread_job.shards)
    assert are_apart(spread_job, HOSTS)


def test_where_one_host_is_left_a_backup_there_is_better_than_none(spread_job: Any) -> None:
    for node in (12, 13):
        spread_job.lose(node)
    assert {shard.primary for shard in spread_job.shards} <= {10, 11}
    assert {shard.backup for shard in spread_job.shards} <= {10, 11}


def test_backups_move_one_by_one_to_a_host_that_comes_later(spread_job: Any) -> None:
    for node in (12, 13):
        spread_job.lose(node)
    spread_job.fill(*range(4))
    spread_job.join(14, "server", 2, host=2)
    while filling := [number for number, shard in enumerate(spread_job.shards) if not shard.filled]:
        assert len({spread_job.shards[number].primary for number in filling}) == len(filling), "one of each server"
        spread_job.fill(*filling)
    assert {shard.backup for shard in spread_job.shards} == {14}


def test_a_successor_of_the_coordinator_knows_the_hosts(spread_job: Any) -> None:
    successor = spread_job.successor()
    successor.living(*HOSTS, 20, 21)
    successor.lose(12)
    assert are_apart(successor, HOSTS)
