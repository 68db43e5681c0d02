"""`--hosts 2:4`: how many hosts a run begins with, which it asks for, and which it lets go."""

from __future__ import annotations

import pytest

from helpers.supervised import Table, events, of, said_to, started
from shoal.errors import LaunchError, SpecError
from shoal.launch.engines.ray_plan import RayNode, RayWish, bundle_of_more, bundles_to_wait_for, plan_bundles
from shoal.launch.host_scaling import COMES_WITHIN_S, LOOK_EVERY_S, RETRY_S, TRIED_FOR_S
from shoal.launch.messages import Answer, HostCame, HostLost, LetGo, Output, ScaleRequest, StartProcess, WantHosts
from shoal.launch.worlds import describe_world, plan_worlds, threads_on
from shoal.spec import Cluster, Job
from shoal.spec.host_facts import HostFacts

A, B, C = (HostFacts(name=name, address=f"10.0.0.{ord(name)}", cores=4, port=4000) for name in "abc")


def job(strategy: str = "data", hosts: str = "1:4", on: str = "ssh:a,b,c") -> Job:
    return Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=8, threads=1, on=on, hosts=hosts))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hosts": "2"}, "hosts must be limits such as 2:8, found '2'"),
        ({"hosts": "0:2"}, "hosts must be limits such as 2:8"),
        ({"hosts": "4:2"}, "must end with 2 or more, and no fewer than it begins with"),
        ({"hosts": "1:1"}, "must end with 2 or more"),
        (
            {"hosts": "2:4", "on": "local"},
            "but on=local has the same ones from the first step to the last; use ssh",
        ),
        ({"hosts": "2:4", "on": "spark://a:7077"}, "but on=spark://a:7077 has the same ones"),
        ({"hosts": "2:9"}, "allows 9 hosts, but there are workers=8 .*; give at least workers=9"),
        ({"hosts": "2:4", "workers": "2:8"}, "and so does workers=2:8; give workers as one number"),
    ],
)
def test_wrong_limits_are_refused_in_a_sentence(fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Cluster(**{"workers": 8, "on": "ssh:a,b", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["data:via=ring", "average", "sharded", "ps", "data:batchnorm=sync"])
def test_strategies_whose_workers_stay_the_same_refuse_limits(strategy: str) -> None:
    with pytest.raises(SpecError, match=r"hosts=1:4 lets hosts come and go, but .*leave\s+hosts out"):
        job(strategy)


def test_each_host_has_its_share_of_the_workers() -> None:
    worlds = plan_worlds(job(), (A, B))
    assert [(world.host_number, world.local_rank, world.places) for world in worlds] == [
        (0, 0, (0, 1)),
        (0, 1, (2, 3)),
        (1, 0, (4, 5)),
        (1, 1, (6, 7)),
    ]
    assert {world.hosts for world in worlds} == {(2, 2)}
    assert threads_on(job(), (A, B)) == 1
    assert describe_world(job(), 4, (A, B)).text.startswith(
        "4 workers on 2 hosts (a, b, of 1 to 4), 1 thread each"
    )


def test_one_host_is_the_first_of_several() -> None:
    worlds = plan_worlds(job(), (A,))
    assert [world.places for world in worlds] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {world.hosts for world in worlds} == {(2, 0)} and all(world.is_spread for world in worlds)
    served = plan_worlds(job("ps:servers=2,sync=asp"), (A,))
    assert [world.role for world in served] == ["coordinator", "server", "server", "worker", "worker"]
    assert served[0].coordinator_address == "tcp://10.0.0.97:4000"


def train(table: Table, seconds: float, samples_per_s: float, begin: int) -> tuple[list[Output], int]:
    """Let the first worker tell its samples for so long; what is asked for, and how many there are."""
    asked: list[Output] = []
    for _ in range(int(seconds)):
        begin += int(samples_per_s)
        asked += table.say(0, "steps", steps=[], samples=begin)
        asked += table.wait(1.0)
    return asked, begin


def grown(table: Table, speed: float) -> tuple[list[Output], int]:
    """A run on one host, at 100 samples a second, that asks for another; which comes, and trains at this speed."""
    table.begin()
    asked, samples = train(table, TRIED_FOR_S + 2 * LOOK_EVERY_S, 100, 0)
    assert of(WantHosts, asked)[0] == WantHosts(None, 1)
    asked = table.tell(HostCame(B))
    guests = [one.process for one in of(StartProcess, asked)]
    assert [one.world.host_number for one in of(StartProcess, asked)] == [1, 1], "its share"
    for guest in guests:
        table.say(guest, "state", state="ready", step=0)
    for process in (0, 1, *guests):
        assert said_to(process, table.asked)[-1]["kind"] == "redeal"
        table.say(process, "state", state="training", step=0)
    table.asked.clear()
    return train(table, TRIED_FOR_S + 3 * LOOK_EVERY_S, speed, samples)


def test_a_host_that_makes_the_run_faster_stays_and_the_next_is_asked_for() -> None:
    asked, _ = grown(Table(job(), hosts=(A,)), 180)
    assert not of(LetGo, asked) and of(WantHosts, asked)


def test_a_host_that_gains_nothing_is_let_go_and_not_asked_for_again_soon() -> None:
    table = Table(job(), hosts=(A,))
    asked, samples = grown(table, 101)
    assert of(LetGo, asked) == [LetGo(1)] and not of(WantHosts, asked)
    (line,) = events("line", asked)
    assert line["text"] == "host b is let go: it changed the speed by +1%"
    table.tell(HostLost(1, "Host b was asked to leave."))
    asked, samples = train(table, 3 * COMES_WITHIN_S, 100, samples)
    assert not of(WantHosts, asked)
    assert of(WantHosts, train(table, RETRY_S, 100, samples)[0])


def test_below_the_least_a_run_goes_on_and_says_so() -> None:
    table = Table(job(hosts="2:4"), hosts=(A, B))
    table.begin()
    (warning,) = events("warning", table.tell(HostLost(1, "Host b is gone.")))
    assert warning["text"] == (
        "1 host of at least 2 are left; the run goes on with them, and takes in others that come"
    )
    assert table.machine.over is None


@pytest.mark.parametrize("wanted", ["1", "+3", "-1"])
def test_who_asks_for_what_is_outside_of_the_limits_is_refused(wanted: str) -> None:
    table = Table(job(hosts="2:4"), hosts=(A, B))
    table.begin()
    (answer,) = of(Answer, table.tell(ScaleRequest(number=1, hosts=wanted)))
    assert answer.answer.is_refused and "This run was started with --hosts 2:4" in answer.answer.text


def test_whoever_asks_for_hosts_decides_from_then_on() -> None:
    table = Table(job(), hosts=(A,))
    table.begin()
    assert of(WantHosts, table.tell(ScaleRequest(number=1, hosts="+1"))) == [WantHosts(1, 1)]
    assert not of(WantHosts, train(table, RETRY_S, 100, 0)[0])


def test_with_a_ticket_nobody_has_to_be_asked() -> None:
    table = Table(job(on="join:4"), hosts=(A,))
    table.begin()
    assert not of(WantHosts, train(table, 10 * LOOK_EVERY_S, 100, 0)[0])


def test_workers_of_ps_come_and_go_with_their_hosts() -> None:
    table = Table(job("ps:servers=2,sync=asp"), hosts=(A, B))
    assert [role for _, role, _ in started(table.asked)].count("worker") == 4
    table.begin()
    table.tell(HostCame(C))
    assert said_to(0, table.asked)[-1] == {"kind": "scale", "workers": 6, "why": "host c has come"}
    table.tell(HostLost(1, "Host b is gone."))
    assert said_to(0, table.asked)[-1] == {"kind": "scale", "workers": 4, "why": "host b is gone"}


def test_nodes_of_ray_are_asked_for_within_the_limits() -> None:
    nodes = [RayNode(name=name, address=f"10.0.0.{ord(name)}", has={"CPU": 2}) for name in "abc"]
    cluster = Cluster(workers=8, threads=1, on="ray", hosts="2:4")
    assert plan_bundles(nodes, RayWish(), cluster) == [{"CPU": 2}] * 3
    assert bundles_to_wait_for(RayWish(wait_s=300), cluster) == [{"CPU": 2}] * 2
    assert bundle_of_more(RayWish(), cluster, 4) == {"CPU": 2}
    with pytest.raises(
        LaunchError, match="2 on each of at least 2 nodes, but the Ray cluster has a 2 CPU; ask for"
    ):
        plan_bundles(nodes[:1], RayWish(), cluster)
    with pytest.raises(SpecError, match="nodes=2 and hosts=2:4 say the same; leave nodes out"):
        plan_bundles(nodes, RayWish(nodes=2), cluster)
