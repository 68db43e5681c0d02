"""A run with servers, the supervisor's part of it: who is told what, and who is started when."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from helpers.supervised import Table, events, of, said_to, started
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.messages import Answer, Interrupt, Load, MeasureLoad, ScaleRequest, Signal, Started
from shoal.launch.service import AUDIT_TIMEOUT_S
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose

COORDINATOR, SERVER_0, SERVER_1, WORKER_0, WORKER_1 = range(5)
KILLED = -signal.SIGKILL


@pytest.fixture
def table() -> Table:
    """Two servers and two workers, about to start. Their nodes are their numbers."""
    job = Job(target="toy.py", strategy="ps:servers=2,sync=asp", cluster=Cluster(workers=2, threads=1))
    return Table(job)


def finish(table: Table, worker: int) -> list[Any]:
    """Let a worker do all its work and end."""
    table.say(worker, "done", results={"rank": table.machine.crew.hands[worker].global_rank})
    return table.end(worker)


def seat(node: int, role: str, rank: int) -> dict[str, Any]:
    return {"node": node, "role": role, "rank": rank}


def order(table: Table, action: str, process: int = COORDINATOR, **values: Any) -> list[Any]:
    return table.say(process, "order", action=action, **values)


EVERYBODY = [seat(1, "server", 0), seat(2, "server", 1), seat(3, "worker", 0), seat(4, "worker", 1)]


def test_a_coordinator_is_told_who_lives_once_it_can_hear(table: Table) -> None:
    table.begin(SERVER_0, SERVER_1, WORKER_0, WORKER_1)
    table.tell(Started(COORDINATOR))
    table.end(WORKER_1, KILLED)
    assert not said_to(COORDINATOR, table.asked), "it cannot hear yet"
    asked = table.say(COORDINATOR, "state", state="ready", step=0)
    assert said_to(COORDINATOR, asked) == [{"kind": "living", "members": EVERYBODY[:3], "left": []}]


def test_a_coordinator_is_told_of_every_end(table: Table) -> None:
    table.begin()
    assert said_to(COORDINATOR, finish(table, WORKER_1)) == [{"kind": "left", **seat(4, "worker", 1)}]
    assert said_to(COORDINATOR, table.end(SERVER_1, KILLED)) == [{"kind": "lost", **seat(2, "server", 1)}]
    assert said_to(COORDINATOR, table.end(WORKER_0, 3)) == [{"kind": "lost", **seat(3, "worker", 0)}]


STANDBY = 5


@pytest.fixture
def guarded() -> Table:
    """The same with a standby."""
    job = Job(target="toy.py", strategy="ps:servers=2,sync=asp,standby=1", cluster=Cluster(workers=2, threads=1))
    return Table(job)


def test_a_standby_is_the_coordinator_as_soon_as_that_dies(guarded: Table) -> None:
    guarded.begin()
    asked = guarded.end(COORDINATOR, KILLED)
    assert said_to(STANDBY, asked) == [{"kind": "coordinate", "coordinator": ""}]
    assert [role for _, role, _ in started(asked)] == ["standby"], "and another one waits"
    guarded.end(WORKER_1, KILLED)
    assert not said_to(STANDBY, guarded.asked[-1:]), "it cannot hear yet"
    asked = guarded.say(STANDBY, "state", state="ready", step=0)
    assert said_to(STANDBY, asked) == [{"kind": "living", "members": EVERYBODY[:3], "left": []}]
    asked = guarded.end(STANDBY, KILLED)
    assert [role for _, role, _ in started(asked)] == ["coordinator"], "the next standby is not ready yet"


def test_a_standby_that_dies_is_followed_by_another(guarded: Table) -> None:
    guarded.begin()
    asked = guarded.end(STANDBY, KILLED)
    assert [role for _, role, _ in started(asked)] == ["standby"]
    asked = guarded.end(COORDINATOR, KILLED)
    assert [role for _, role, _ in started(asked)] == ["coordinator"]


def test_the_number_of_workers_follows_the_load() -> None:
    """The supervisor looks, and the coordinator decides; once the user says a number, it is that."""
    cluster = Cluster(workers="2:4", threads=1)  # type: ignore[arg-type]
    table = Table(Job(target="toy.py", strategy="ps:servers=2,sync=asp", cluster=cluster))
    assert [hand.role for hand in table.machine.crew.hands].count("worker") == 2
    table.begin()
    for second in range(5):
        table.say(WORKER_0, "steps", steps=[[second + 1, 0.1]], samples=100 * second, total_steps=999)
        table.wait(1.0)
    assert of(MeasureLoad, table.asked)
    asked = table.tell(Load(idle_cores=1.5, waiting=0.0))
    (wish,) = said_to(COORDINATOR, asked)
    assert (wish["kind"], wish["workers"], wish["why"]) == ("scale", 3, "1.5 cores are idle")
    asked = table.tell(ScaleRequest(number=7, workers=2, servers=None))
    assert table.say(COORDINATOR, "answer", text="of the first") == [], "nobody waits for that one"
    (answer,) = of(Answer, table.say(COORDINATOR, "answer", text="of the second"))
    assert (answer.request, answer.answer.text) == (7, "of the second")
    before = len(of(MeasureLoad, table.asked))
    table.wait(5.0)
    assert len(of(MeasureLoad, table.asked)) == before


def test_whoever_crashes_after_its_work_was_done_has_left(table: Table) -> None:
    table.begin()
    table.say(WORKER_1, "done", results={})
    assert said_to(COORDINATOR, table.end(WORKER_1, KILLED)) == [{"kind": "left", **seat(4, "worker", 1)}]
    assert "after its work was done" in events("warning", table.asked)[0]["text"]


def test_a_successor_is_told_of_those_who_ended_while_it_started(table: Table) -> None:
    """Between its fork and the moment it can hear nobody else would tell it."""
    table.begin()
    finish(table, WORKER_1)
    ((successor, role, _),) = started(table.end(COORDINATOR, KILLED))
    assert role == "coordinator"
    table.tell(Started(successor))
    finish(table, WORKER_0)
    assert not said_to(successor, table.asked)
    asked = table.say(successor, "state", state="ready", step=0)
    assert said_to(successor, asked) == [
        {"kind": "living", "members": EVERYBODY[:2], "left": EVERYBODY[2:]},
    ]


def test_a_coordinator_that_counted_is_followed_while_workers_may_need_one(table: Table) -> None:
    table.begin()
    table.say(COORDINATOR, "done", results={"clean": True})
    assert [role for _, role, _ in started(table.end(COORDINATOR, KILLED))] == ["coordinator"]


def test_a_coordinator_that_counted_is_followed_while_the_first_workers_results_are_missing(table: Table) -> None:
    table.begin()
    finish(table, WORKER_1)
    table.say(COORDINATOR, "done", results={"clean": True})
    table.end(WORKER_0, KILLED)
    ((successor, role, _),) = started(table.end(COORDINATOR, KILLED))
    assert role == "coordinator"
    table.tell(Started(successor))
    table.say(successor, "state", state="ready", step=0)
    assert started(order(table, "start", successor, role="worker", rank=0)) == [(6, "worker", 0)]


def test_a_coordinator_that_ends_before_it_has_counted_is_followed(table: Table) -> None:
    table.begin()
    finish(table, WORKER_0)
    finish(table, WORKER_1)
    assert [role for _, role, _ in started(table.end(COORDINATOR, 0))] == ["coordinator"]


def test_a_run_whose_audit_is_missing_fails_with_a_sentence(table: Table) -> None:
    table.begin()
    finish(table, WORKER_0)
    finish(table, WORKER_1)
    table.wait(AUDIT_TIMEOUT_S - 0.1)
    assert table.machine.over is None
    table.wait(0.2)
    for process in (COORDINATOR, SERVER_0, SERVER_1):
        table.end(process, -signal.SIGTERM)
    assert table.machine.over is not None
    assert isinstance(table.machine.over.error, WorkerFailed) and table.machine.over.error.exit_code == 1
    assert "did not say what it counted" in str(table.machine.over.error)


def test_nobody_takes_a_place_whose_last_holder_has_not_ended(table: Table) -> None:
    """Both would use the same buffers."""
    table.begin()
    order(table, "end", node=3, role="worker", rank=0)
    assert not started(order(table, "start", role="worker", rank=0))
    assert not started(table.wait(29.0))
    assert of(Signal, table.wait(1.0)) == [Signal(WORKER_0, signal.SIGKILL)]
    asked = table.end(WORKER_0, KILLED)
    assert started(asked) == [(5, "worker", 0)]
    assert said_to(COORDINATOR, asked) == [{"kind": "lost", **seat(3, "worker", 0)}]


def test_nobody_is_started_for_a_place_that_somebody_is_on_the_way_to(table: Table) -> None:
    table.begin()
    table.end(WORKER_0, KILLED)
    assert started(order(table, "start", role="worker", rank=0)) == [(5, "worker", 0)]
    assert not started(order(table, "start", role="worker", rank=0))
    assert not started(finish(table, 5)), "and nobody follows when it has done its work"


def test_a_coordinator_whose_words_make_no_sense_ends_nothing(table: Table) -> None:
    table.begin()
    assert not started(order(table, "dance", role="worker", rank=0))
    assert not started(order(table, "start", role="king", rank=0))
    (warned,) = events("warning", table.asked)
    assert warned["text"].startswith("coordinator 0 said something that cannot be understood")
    table.say(COORDINATOR, "done", results={"clean": 3})
    assert not events("audit", table.asked) and not table.machine.crew.hands[COORDINATOR].is_done


@pytest.fixture
def scripts() -> Table:
    """The same, where all of them run a script."""
    cluster = Cluster(workers=2, threads=1)
    return Table(Job(target="toy.py", purpose=Purpose.SCRIPT, strategy="ps:servers=2", cluster=cluster))


def test_a_script_that_dies_before_fit_or_in_it_is_run_again(scripts: Table) -> None:
    scripts.begin()
    for process, rank in ((WORKER_0, 0), (WORKER_1, 1)):
        if process == WORKER_1:
            scripts.say(process, "state", state="ready", step=0)  # it is not there yet
        lost = seat(3 + rank, "worker", rank)
        assert said_to(COORDINATOR, scripts.end(process, KILLED)) == [{"kind": "lost", **lost}]
        assert started(order(scripts, "start", role="worker", rank=rank)) == [(5 + rank, "worker", rank)]
    assert not scripts.machine.has_failed


@pytest.mark.parametrize(
    ("state", "code"), [("script", KILLED), ("script", 3), ("training", 3), ("ready", 3), ("ready", 0)]
)
def test_a_script_that_ends_itself_or_dies_after_fit_ends_the_run(scripts: Table, state: str, code: int) -> None:
    scripts.begin()
    scripts.say(WORKER_1, "state", state=state, step=0)
    scripts.end(WORKER_1, code)
    assert scripts.machine.has_failed
    assert not events("lost", scripts.asked)


def test_a_server_whose_script_ends_itself_ends_the_run(scripts: Table) -> None:
    scripts.begin()
    scripts.end(SERVER_1, 3)
    assert scripts.machine.has_failed


@pytest.mark.parametrize("code", [130, 1, 0, -signal.SIGINT])
def test_scripts_that_were_interrupted_have_ended_well(scripts: Table, code: int) -> None:
    scripts.begin()
    scripts.tell(Interrupt())
    for process in (WORKER_0, WORKER_1):
        assert said_to(process, scripts.asked) == [{"kind": "stop"}]
        scripts.end(process, code)
    for process in (COORDINATOR, SERVER_0, SERVER_1):
        assert said_to(process, scripts.asked)[-1] == {"kind": "stop"}
        scripts.end(process)
    assert scripts.machine.over is not None and isinstance(scripts.machine.over.error, Interrupted)
