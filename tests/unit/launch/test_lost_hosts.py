"""A run on several hosts, the supervisor's part: who goes where, what a lost host means, how workers meet."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from helpers.supervised import Table, events, of, said_to, started
from shoal.errors import LaunchError, WorkerFailed
from shoal.launch.messages import (
    Answer,
    Ended,
    HostCame,
    HostLost,
    LetGo,
    ScaleRequest,
    Started,
    StartProcess,
    WantHosts,
)
from shoal.launch.worlds import describe_world, plan_worlds, threads_on
from shoal.spec import Cluster, Job
from shoal.spec.host_facts import HostFacts

A = HostFacts(name="a", address="10.0.0.1", cores=2, port=4000)
B = HostFacts(name="b", address="10.0.0.2", cores=4, port=5000)
COORDINATOR, SERVER_0, SERVER_1, WORKER_0, WORKER_1, WORKER_2 = range(6)


def job(strategy: str = "ps:servers=2,sync=asp", workers: int = 3) -> Job:
    return Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=workers, threads=1, on="ssh:a,b"))


@pytest.fixture
def table() -> Table:
    """Coordinator, server 1 and worker 0 are on a; server 0 and workers 1 and 2 on b."""
    return Table(job(), hosts=(A, B))


def test_each_process_knows_where_it_stands() -> None:
    worlds = plan_worlds(job(), (A, B))
    assert [(world.role, world.host_number, world.host) for world in worlds] == [
        ("coordinator", 0, "10.0.0.1"),
        ("server", 1, "10.0.0.2"),
        ("server", 0, "10.0.0.1"),
        ("worker", 0, "10.0.0.1"),
        ("worker", 1, "10.0.0.2"),
        ("worker", 1, "10.0.0.2"),
    ]
    assert {world.hosts for world in worlds} == {(1, 2)} and all(world.is_spread for world in worlds)
    assert [(world.local_rank, world.local_size) for world in worlds[WORKER_0:]] == [(0, 1), (0, 2), (1, 2)]
    assert {world.coordinator_address for world in worlds} == {"tcp://10.0.0.1:4000"}
    assert worlds[WORKER_1].any_port == "tcp://10.0.0.2:*"


def test_one_host_of_a_network_is_as_this_one() -> None:
    one = Job(target="toy.py", strategy="ps", cluster=Cluster(workers=2, threads=1, on="ssh:a"))
    for world in plan_worlds(one, (A,)):
        assert not world.is_spread and world.hosts == () and world.coordinator == ""
    assert one.strategy == "ps", "its processes share memory"


def test_the_world_of_several_hosts_in_words() -> None:
    told = describe_world(job(), 3, (A, B))
    assert told.hosts == 2
    assert told.text == (
        "3 workers, 2 servers and a coordinator on 2 hosts (a, b), 1 thread each, encrypted between them"
    )


def test_threads_are_the_same_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = Job(target="toy.py", strategy="ps", cluster=Cluster(workers=3, on="ssh:a,b"))
    assert threads_on(asked, (A, B)) == 2


def test_a_lost_host_is_one_event_and_all_of_its_processes_have_ended(table: Table) -> None:
    table.begin()
    asked = table.tell(HostLost(1, "Host b is gone."))
    assert events("host", asked) == [{"name": "b", "reason": "Host b is gone.", "processes": 3}]
    assert [lost["rank"] for lost in events("lost", asked)] == [0, 1, 2]
    assert events("lost", asked)[0]["reason"] == "Server 0 was on host b, which was lost."
    told = [word["kind"] for word in said_to(COORDINATOR, asked)]
    assert told == ["lost"] * 3, "the coordinator decides who follows them"
    assert table.machine.over is None
    assert not table.tell(HostLost(1, "Host b is gone.")), "that is known"


def test_who_follows_goes_to_a_host_that_is_left(table: Table) -> None:
    table.begin()
    table.tell(HostLost(1, "Host b is gone."))
    asked = table.say(COORDINATOR, "order", action="start", role="server", rank=0)
    asked += table.say(COORDINATOR, "order", action="start", role="worker", rank=2)
    worlds = [one.world for one in of(StartProcess, asked)]
    assert [(world.role, world.host_number, world.host) for world in worlds] == [
        ("server", 0, "10.0.0.1"),
        ("worker", 0, "10.0.0.1"),
    ]


def test_a_successor_goes_where_there_is_most_room(table: Table) -> None:
    table.begin()
    table.tell(Ended(process=WORKER_0, exit_code=-signal.SIGKILL))
    (start,) = of(StartProcess, table.say(COORDINATOR, "order", action="start", role="worker", rank=0))
    assert start.world.host_number == 0, "b has two workers for four cores"
    assert started([start]) == [(6, "worker", 0)]


def test_the_coordinator_is_followed_on_another_host_and_all_are_told_where(table: Table) -> None:
    table.begin()
    asked = table.tell(HostLost(0, "Host a is gone."))
    (start,) = of(StartProcess, asked)
    assert (start.world.role, start.world.host_number, start.world.host) == ("coordinator", 1, "10.0.0.2")
    moved = {"kind": "coordinator", "address": "tcp://10.0.0.2:5000"}
    assert start.world.coordinator_address == moved["address"]
    assert all(said_to(process, asked) == [moved] for process in (SERVER_0, WORKER_1, WORKER_2))
    asked = table.say(start.process, "state", state="ready", step=0)
    (living,) = said_to(start.process, asked)
    assert [one["node"] for one in living["members"]] == [SERVER_0, WORKER_1, WORKER_2]
    (start,) = of(StartProcess, order(table, start.process, role="worker", rank=0))
    assert start.world.coordinator_address == moved["address"], "who comes later looks for it there"


def order(table: Table, coordinator: int, **seat: Any) -> list[Any]:
    return table.say(coordinator, "order", action="start", **seat)


def test_the_loss_of_the_last_host_ends_the_run(table: Table) -> None:
    table.begin()
    table.tell(HostLost(1, "Host b is gone."))
    table.tell(HostLost(0, "Host a is gone."))
    assert table.machine.over is not None


def test_a_worker_that_nobody_can_follow_takes_the_run_with_it() -> None:
    table = Table(job("data:via=ring", 2), hosts=(A, B))
    table.begin()
    table.tell(HostLost(1, "Host b is gone."))
    table.wait(5.0)
    over = table.machine.over
    assert over is not None and isinstance(over.error, WorkerFailed) and over.error.is_transient
    assert "was on host b, which was lost. Host b is gone. " in str(over.error), "and why that was"


@pytest.fixture
def training() -> Table:
    """Worker 0 is on a, workers 1 and 2 are on b, and all of them train by `data`."""
    table = Table(job("data", 3), hosts=(A, B))
    table.begin()
    for worker in range(3):
        table.say(worker, "state", state="training", step=0)
    return table


def test_places_of_a_lost_host_are_dealt_to_those_that_are_left(training: Table) -> None:
    asked = training.tell(HostLost(0, "Host a is gone."))
    assert [lost["places"] for lost in events("lost", asked)] == [[0]]
    dealt = {"kind": "redeal", "deal": [[0], [1, 2]], "hosts": [0, 2], "generation": 1}
    assert said_to(1, asked) == [{**dealt, "member": 0}] and said_to(2, asked) == [{**dealt, "member": 1}]
    assert not events("replaced", training.say(1, "adopted", places=[0], generation=1))
    asked = training.say(2, "adopted", places=[1, 2], generation=1)
    (replaced,) = events("replaced", asked)
    assert (replaced["places"], replaced["hosts"]) == ([0], [[0], [1, 2]])
    assert training.machine.over is None


def test_places_stay_with_workers_that_have_a_state_of_their_own() -> None:
    """Whether a worker dies with its host or alone, nobody follows it: those that are left do its work."""
    table = Table(job("average", 3), hosts=(A, B))
    table.begin()
    for worker in range(3):
        table.say(worker, "state", state="training", step=0)
    asked = die(table, 1)
    dealt = {"kind": "redeal", "deal": [[0, 1], [2]], "hosts": [1, 1], "generation": 1}
    assert not of(StartProcess, asked)
    assert said_to(0, asked) == [{**dealt, "member": 0}] and said_to(2, asked) == [{**dealt, "member": 1}]
    asked = table.tell(HostLost(0, "Host a is gone."))
    dealt = {"kind": "redeal", "deal": [[0, 1, 2]], "hosts": [0, 1], "generation": 2}
    assert said_to(2, asked) == [{**dealt, "member": 0}]
    (replaced,) = events("replaced", table.say(2, "adopted", places=[0, 1, 2], generation=2))
    assert (replaced["places"], replaced["hosts"]) == ([0, 1], [[0, 1, 2]])
    assert table.machine.over is None


def die(table: Table, process: int, exit_code: int = -signal.SIGKILL) -> list[Any]:
    return table.tell(Ended(process=process, exit_code=exit_code))


def get_ready(table: Table, process: int) -> list[Any]:
    table.tell(Started(process))
    return table.say(process, "state", state="ready", step=0)


def test_a_worker_that_dies_alone_is_followed_on_its_own_host(training: Table) -> None:
    """All others wait until its successor is ready, and are told that its host's memory is to be made good."""
    asked = die(training, 1)
    (start,) = of(StartProcess, asked)
    world = start.world
    assert (world.role, world.host_number, world.local_rank, world.local_size) == ("spare", 1, 0, 2)
    assert said_to(0, asked) == said_to(2, asked) == [{"kind": "hold"}]
    asked = get_ready(training, start.process)
    dealt = {"kind": "redeal", "deal": [[0], [1], [2]], "hosts": [1, 2], "generation": 1, "torn": [1]}
    assert [said_to(process, asked) for process in (0, start.process, 2)] == [
        [{**dealt, "member": member}] for member in range(3)
    ]
    for process, place in ((0, 0), (start.process, 1)):
        assert not events("replaced", training.say(process, "adopted", places=[place], generation=1))
    (replaced,) = events("replaced", training.say(2, "adopted", places=[2], generation=1))
    assert (replaced["places"], replaced["hosts"]) == ([1], [[0], [1], [2]])


def test_a_successor_that_dies_is_followed_until_it_is_enough(training: Table) -> None:
    (start,) = of(StartProcess, die(training, 1))
    for _ in range(training.machine.job.max_failures - 1):
        (start,) = of(StartProcess, die(training, start.process))
        assert (start.world.host_number, start.world.local_rank) == (1, 0)
    assert not of(StartProcess, die(training, start.process)), "none of them came a step further"
    training.wait(5.0)
    assert training.machine.over is not None and isinstance(training.machine.over.error, WorkerFailed)


def test_a_host_that_is_lost_while_it_waits_for_a_successor_is_lost(training: Table) -> None:
    die(training, 1)
    asked = training.tell(HostLost(1, "Host b is gone."))
    dealt = {"kind": "redeal", "deal": [[0, 1, 2]], "hosts": [1, 0], "member": 0, "generation": 1}
    assert said_to(0, asked) == [dealt], "there is nothing to be made good"


def test_where_workers_died_on_all_hosts_nobody_has_the_whole_state(training: Table) -> None:
    (start,) = of(StartProcess, die(training, 1))
    get_ready(training, start.process)
    die(training, 0)
    training.wait(5.0)
    over = training.machine.over
    assert over is not None and isinstance(over.error, WorkerFailed) and over.error.is_transient


def test_once_a_successor_goes_on_its_host_is_whole_again(training: Table) -> None:
    (start,) = of(StartProcess, die(training, 1))
    get_ready(training, start.process)
    for process, place in ((start.process, 1), (2, 2)):
        training.say(process, "adopted", places=[place], generation=1)
    (start,) = of(StartProcess, die(training, 0))
    (word,) = said_to(2, get_ready(training, start.process))
    assert (word["torn"], word["generation"]) == ([0], 2)


def test_who_meets_after_a_loss_waits_for_the_living_alone(training: Table) -> None:
    training.say(1, "announced", name="parting@0", text="")
    training.tell(HostLost(0, "Host a is gone."))
    assert not training.say(2, "announced", name="parting@0", text=""), "it did not know yet"
    training.say(2, "announced", name="parting@1", text="")
    asked = training.say(1, "announced", name="parting@1", text="")
    assert said_to(2, asked) == [{"kind": "met", "name": "parting@1", "texts": ["", ""]}]


def test_a_host_that_is_lost_after_all_is_done_is_missed_by_nobody(training: Table) -> None:
    training.say(0, "done", results={"steps": 4})
    for worker in range(3):
        training.say(worker, "announced", name="parting@0", text="")
    asked = training.tell(HostLost(1, "Host b is gone."))
    assert not said_to(0, asked) and not events("lost", asked)
    training.tell(Ended(process=0, exit_code=0))
    assert training.machine.over is not None and training.machine.over.error is None


def test_who_has_not_begun_to_train_cannot_go_on() -> None:
    table = Table(job("data", 3), hosts=(A, B))
    table.begin(0, 1)
    table.tell(HostLost(0, "Host a is gone."))
    table.wait(5.0)
    assert table.machine.over is not None and isinstance(table.machine.over.error, WorkerFailed)


def answers(asked: list[Any]) -> list[dict[str, Any]]:
    return [one.answer.plain() for one in of(Answer, asked)]


def test_a_host_leaves_on_request_as_if_it_were_lost(training: Table) -> None:
    asked = training.tell(ScaleRequest(number=1, hosts="-1"))
    (answer,) = answers(asked)
    assert (answer["hosts"], answer["is_refused"]) == (1, False)
    assert of(LetGo, asked) == [LetGo(1)]
    asked = training.tell(ScaleRequest(number=2, hosts="-2"))
    assert answers(asked)[0]["text"] == "This run has 2 hosts, and needs at least one of them."


def test_a_host_more_must_have_something_to_do(training: Table) -> None:
    (answer,) = answers(training.tell(ScaleRequest(number=1, hosts="+1")))
    assert answer["is_refused"] and "was cut into 3 places" in answer["text"]
    training.tell(HostLost(0, "Host a is gone."))
    assert of(WantHosts, training.tell(ScaleRequest(number=2, hosts="2"))) == [WantHosts(2, 1)]


def test_a_host_that_comes_gets_places_when_its_workers_are_ready(training: Table) -> None:
    training.tell(HostLost(0, "Host a is gone."))
    asked = training.tell(HostCame(A))
    (start,) = of(StartProcess, asked)
    assert (start.world.role, start.world.host_number, start.world.host) == ("spare", 2, "10.0.0.1")
    assert (start.world.local_rank, start.world.local_size) == (0, 1)
    training.tell(Started(start.process))
    asked = training.say(start.process, "state", state="ready", step=0)
    dealt = {"kind": "redeal", "deal": [[0], [1], [2]], "hosts": [0, 2, 1], "generation": 2}
    assert [said_to(process, asked) for process in (1, 2, start.process)] == [
        [{**dealt, "member": member}] for member in range(3)
    ]


def test_who_cannot_do_without_a_host_keeps_it() -> None:
    table = Table(job("data:via=ring", 2), hosts=(A, B))
    table.begin()
    (answer,) = answers(table.tell(ScaleRequest(number=1, hosts="-1")))
    assert answer["is_refused"] and "hosts come and go under ps and data" in answer["text"]


def test_workers_meet_once_all_have_come() -> None:
    table = Table(job("data:via=ring", 2), hosts=(A, B))
    table.begin()
    assert not table.say(1, "announced", name="addresses", text="tcp://10.0.0.2:7")
    asked = table.say(0, "announced", name="addresses", text="tcp://10.0.0.1:6")
    met = {"kind": "met", "name": "addresses", "texts": ["tcp://10.0.0.1:6", "tcp://10.0.0.2:7"]}
    assert said_to(0, asked) == said_to(1, asked) == [met]
    table.say(0, "announced", name="addresses", text="again")
    asked = table.say(1, "announced", name="addresses", text="and again")
    assert said_to(1, asked) == [{**met, "texts": ["again", "and again"]}]


def test_hosts_without_room_are_refused() -> None:
    limited = Job(
        target="toy.py", strategy="ps", cluster=Cluster(workers=8, threads=1, on="ssh:a,b", memory="1GiB")
    )
    small = [HostFacts(name=name, memory_bytes=2 << 30, port=1) for name in "ab"]
    with pytest.raises(LaunchError, match="8 workers were asked for, but a, b have memory"):
        plan_worlds(limited, small)
