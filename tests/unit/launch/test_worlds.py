"""Which processes a job consists of, and where each of them stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.launch import load
from shoal.launch.worlds import (
    advice_after_loss,
    can_move,
    can_replace,
    describe_world,
    member_world,
    plan_worlds,
    servers_of,
)
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose


def job(workers: int, strategy: str = "data", **more: int) -> Job:
    return Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=workers, threads=1, **more))


def test_a_job_with_servers() -> None:
    worlds = plan_worlds(job(2, "ps:servers=3"))
    assert [(world.node, world.role, world.global_rank) for world in worlds] == [
        (0, "coordinator", 0),
        (1, "server", 0),
        (2, "server", 1),
        (3, "server", 2),
        (4, "worker", 0),
        (5, "worker", 1),
    ]
    assert {world.world_size for world in worlds} == {2}
    assert [world.is_first for world in worlds].count(True) == 1


def test_servers_run_a_script_beside_its_workers() -> None:
    script = Job(target="toy.py", purpose=Purpose.SCRIPT, strategy="ps:servers=2", cluster=Cluster(workers=1))
    worlds = plan_worlds(script)
    assert [world.role for world in worlds] == ["coordinator", "server", "server", "worker"]
    assert all(world.secret and world.coordinator for world in worlds), "a key, and the script's own port"
    assert describe_world(script).servers == 2
    assert servers_of(Job(target="toy.py", purpose=Purpose.EVALUATE, strategy="ps:servers=2")) == 0


def test_all_processes_of_a_run_share_one_secret_and_address() -> None:
    for asked in (job(2, "ps"), job(2), job(1, spares=1)):
        first, *others = plan_worlds(asked)
        assert len(first.secret) == 64 and first.secret not in repr(first)
        assert {(world.secret, world.coordinator) for world in others} == {(first.secret, first.coordinator)}
    (alone,) = plan_worlds(job(1))
    assert alone.secret == "", "nobody else is there to know"
    assert plan_worlds(job(2))[0].secret != plan_worlds(job(2))[0].secret


def test_one_more_worker_stands_beside_the_others() -> None:
    first = plan_worlds(job(2, "ps"))[0]
    added = member_world(first, "worker", 4, node=9)
    assert (added.global_rank, added.world_size, added.node, added.secret) == (4, 5, 9, first.secret)


def test_the_world_in_words() -> None:
    served = describe_world(job(2, "ps:servers=2"))
    assert served.text == "2 workers, 2 servers and a coordinator on 1 host, 1 thread each, loopback only"
    assert served.servers == 2
    spared = describe_world(job(1, spares=1))
    assert spared.text == "1 worker and 1 spare on 1 host, 1 thread each, loopback only"
    assert "servers" not in spared.plain()


def test_fewer_workers_than_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "starting_workers", lambda cluster: 3)
    elastic_job = Job(target="toy.py", cluster=Cluster(workers="1:4", threads=1))  # type: ignore[arg-type]
    worlds = plan_worlds(elastic_job)
    assert [world.places for world in worlds] == [(0,), (1,), (2, 3)]
    assert [world.global_rank for world in worlds] == [0, 1, 2] and {world.world_size for world in worlds} == {4}
    told = describe_world(elastic_job, 3)
    assert told.text.startswith("3 workers (1 to 4) on 1 host") and (told.workers, told.places) == (3, 4)


@pytest.mark.parametrize(
    ("workers", "strategy", "spares", "moves", "replaces"),
    [
        (2, "data", 0, True, True),
        (1, "data", 0, True, False),
        (1, "data", 1, True, True),
        (2, "data:batchnorm=sync", 0, True, True),
        (2, "data:journal=off", 0, True, False),
        (2, "data:via=ring", 0, False, False),
        (2, "ps", 0, False, False),
    ],
)
def test_who_can_follow_whom(workers: int, strategy: str, spares: int, moves: bool, replaces: bool) -> None:
    asked = job(workers, strategy, spares=spares)
    assert (can_move(asked), can_replace(asked)) == (moves, replaces)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("tensor", "nobody else has its part of the model"),
        ("layer", "nobody else has its part of the model"),
        ("layer:phases=2", "nobody can take its place"),
        ("data:via=ring", "nobody can take its place"),
    ],
)
def test_after_a_loss_it_says_why_the_run_ends_and_what_would_have_helped(strategy: str, why: str) -> None:
    asked = job(2, strategy)
    assert advice_after_loss(asked) == (
        f" With strategy={strategy} {why}; with --checkpoint every=200 the run goes on by itself."
    )
    helped = advice_after_loss(replace(asked, on_failure="replace"))
    assert helped.endswith("; with --checkpoint every=200 and --on-failure restart the run goes on by itself.")
    for done in ({"checkpoint": "every=9"}, {"on_failure": "restart"}, {"on_failure": "stop"}):
        assert advice_after_loss(replace(asked, **done)) == ""
