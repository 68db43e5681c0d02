"""The supervisor's machine by itself: what happens goes in with the time, what is to be done comes out."""

from __future__ import annotations

import signal
from typing import Any

from helpers.supervised import Table, events, of
from shoal.comm.words import ScaleAnswered, Takeover
from shoal.errors import Interrupted, LaunchError, WorkerFailed
from shoal.launch.messages import (
    Answer,
    Deaf,
    Ended,
    HostFailed,
    Interrupt,
    Say,
    ScaleRequest,
    Sight,
    Signal,
    StacksTaken,
    Started,
    StartProcess,
    TakeStacks,
)
from shoal.spec import Cluster, Job

WORKER_0, WORKER_1, SPARE = 0, 1, 2


def two_and_a_spare(**more: Any) -> Table:
    return Table(Job(target="toy.py", cluster=Cluster(workers=2, spares=1, threads=1), **more))


def test_processes_are_started_in_order_and_called_by_numbers() -> None:
    table = two_and_a_spare()
    starts = of(StartProcess, table.asked)
    assert [(one.process, one.world.role) for one in starts] == [(0, "worker"), (1, "worker"), (2, "spare")]


def test_a_run_ends_with_the_first_workers_results() -> None:
    table = two_and_a_spare()
    table.begin()
    assert len(events("world", table.asked)) == 1
    for number in (WORKER_1, WORKER_0):
        table.say(number, "done", results={"rank": number})
        assert table.machine.over is None
        table.tell(Ended(process=number, exit_code=0))
    assert table.machine.over is not None and table.machine.over.error is None
    assert table.machine.over.results == {"rank": 0}


def test_a_spare_is_given_the_place_of_a_killed_worker_at_once() -> None:
    table = two_and_a_spare()
    table.begin()
    asked = table.tell(Ended(process=WORKER_1, exit_code=-signal.SIGKILL, ran_out_of_memory=True))
    (lost,) = events("lost", asked)
    assert "memory ran out" in lost["reason"]
    (order,) = of(Say, asked)
    assert (order.process, order.word) == (SPARE, Takeover(places=[1], generation=1))
    (follower,) = of(StartProcess, asked)
    assert (follower.process, follower.world.role) == (3, "spare")
    table.now += 0.5
    (replaced,) = events("replaced", table.say(SPARE, "adopted", places=[1]))
    assert replaced["seconds"] == 0.5 and replaced["spare"] == 0


def test_places_given_to_one_that_is_dead_already_go_to_the_next() -> None:
    """It had died when it was given them, and that is told afterwards."""
    table = two_and_a_spare()
    table.begin()
    table.tell(Ended(process=WORKER_1, exit_code=-signal.SIGKILL))
    asked = table.tell(Started(3), Ended(process=SPARE, exit_code=-signal.SIGKILL))
    assert not of(Say, asked), "the next spare is not ready"
    (order,) = of(Say, table.say(3, "state", state="ready", step=0))
    assert (order.process, order.word.places) == (3, [1])


def test_the_cause_is_told_once_the_others_had_their_time_to_end() -> None:
    table = Table(Job(target="toy.py", cluster=Cluster(workers=2, threads=1), on_failure="stop"))
    table.begin()
    assert not of(Signal, table.tell(Ended(process=WORKER_1, exit_code=3, last_output="bang", log_name="a.log")))
    assert table.machine.next_deadline() is not None and table.machine.next_deadline() <= table.now + 0.3
    asked = table.wait(0.3)
    assert of(Signal, asked) == [Signal(WORKER_0, signal.SIGTERM)]
    assert table.machine.over is None
    asked = table.tell(Ended(process=WORKER_0, exit_code=-signal.SIGTERM))
    assert events("failed", asked) == [{"message": _SENTENCE, "traceback": "bang"}]
    assert table.machine.over is not None
    error = table.machine.over.error
    assert isinstance(error, WorkerFailed) and (error.global_rank, error.exit_code) == (1, 3)


_SENTENCE = "Worker 1 ended with exit code 3 before its work was done. Its output is in a.log."


def test_a_kill_is_a_cause_that_needs_no_other_opinion() -> None:
    table = Table(Job(target="toy.py", cluster=Cluster(workers=2, threads=1), strategy="data:via=ring"))
    table.begin()
    table.say(WORKER_0, "failed", message="Worker 1 is gone.", traceback="", consequence=True)
    asked = table.tell(Ended(process=WORKER_1, exit_code=-signal.SIGKILL))
    assert of(Signal, asked) == [Signal(WORKER_0, signal.SIGTERM)], "at once"
    table.tell(Interrupt(), Ended(process=WORKER_0, exit_code=-signal.SIGTERM))
    assert table.machine.over is not None and isinstance(error := table.machine.over.error, WorkerFailed)
    assert error.is_transient and error.global_rank == 1
    assert table.machine.is_stopping, "the user wants no other attempt"


def test_what_is_worth_another_attempt() -> None:
    raised = {"step": 3, "slot": 0, "sample": None, "error": "ValueError: bad"}
    told = {"message": "bad", "traceback": ""}
    for final, consequence, expected in ((False, False, True), (True, False, False), (True, True, True)):
        table = Table(Job(target="toy.py", cluster=Cluster(workers=2, threads=1), strategy="data:via=ring"))
        table.begin()
        table.say(WORKER_0, "raised", **raised, final=final)
        table.say(WORKER_0, "failed", **told, consequence=consequence)
        table.wait(0.3)
        table.tell(Ended(process=WORKER_0, exit_code=1), Ended(process=WORKER_1, exit_code=-signal.SIGTERM))
        assert table.machine.over is not None and isinstance(error := table.machine.over.error, WorkerFailed)
        assert error.is_transient is expected


def test_whoever_ignores_the_end_is_not_waited_for() -> None:
    table = Table(Job(target="toy.py", cluster=Cluster(workers=2, threads=1), on_failure="stop"))
    table.begin()
    table.tell(Ended(process=WORKER_1, exit_code=3))
    table.wait(0.3)
    assert table.machine.next_deadline() == table.now + 2.0
    table.wait(2.0)
    assert table.machine.over is not None and isinstance(table.machine.over.error, WorkerFailed)


def test_a_host_that_fails_ends_the_run_unless_something_else_did() -> None:
    table = two_and_a_spare()
    table.begin()
    table.tell(HostFailed("The zygote has ended."))
    assert table.machine.over is not None and isinstance(table.machine.over.error, LaunchError)
    table = two_and_a_spare(on_failure="stop")
    table.begin()
    table.tell(Ended(process=WORKER_1, exit_code=3))
    table.wait(0.3)
    table.tell(HostFailed("The zygote has ended."))
    assert table.machine.over is not None and isinstance(table.machine.over.error, WorkerFailed)


def test_who_saves_has_more_time_to_stop() -> None:
    for phase, seconds in (("computing", 120), ("saving", 600)):
        table = two_and_a_spare()
        table.begin()
        table.tell(Interrupt())
        for _ in range(seconds):
            table.say(WORKER_0, "beat", step=1, phase=phase)
            table.say(WORKER_1, "beat", step=1, phase="waiting")
            assert table.machine.over is None
            table.wait(1.0)
        table.wait(1.0)
        assert table.machine.over is not None and f"within {seconds + 1} s" in str(table.machine.over.error)


def test_one_request_stops_after_the_step_and_the_second_at_once() -> None:
    table = two_and_a_spare()
    table.begin()
    assert {one.process for one in of(Say, table.tell(Interrupt()))} == {WORKER_0, WORKER_1}
    assert table.machine.over is None
    table.tell(Interrupt())
    assert table.machine.over is not None and isinstance(table.machine.over.error, Interrupted)


def test_who_is_silent_is_looked_into_then_told_of_and_ended() -> None:
    table = two_and_a_spare()
    table.begin()
    beat = {"phase": "computing", "still": 0.0, "p99": 0.01, "gap": 0.0}
    table.say(WORKER_1, "beat", step=8, **beat)
    while not of(TakeStacks, table.asked) and table.now < 110.0:
        for number in (WORKER_0, SPARE):
            table.say(number, "beat", step=9, **beat)
        table.wait(0.2)
    (look,) = of(TakeStacks, table.asked)
    assert look.step == 9 and look.names == {0: "worker 0", 1: "worker 1", 2: "spare 0"}
    assert not of(Signal, table.asked), "first it is seen where everybody is"
    asked = table.tell(StacksTaken({WORKER_1: Sight(state="it is stopped (SIGSTOP)")}, "stacks-9.txt"))
    (hung,) = events("hung", asked)
    assert hung["rank"] == 1 and hung["reason"].endswith("it is stopped (SIGSTOP)")
    assert of(Signal, asked) == [Signal(WORKER_1, signal.SIGKILL)]
    (lost,) = events("lost", table.tell(Ended(process=WORKER_1, exit_code=-signal.SIGKILL)))
    assert lost["reason"].startswith("Worker 1 hung and was ended: it gave no sign of life")


def test_requests_are_answered_under_their_numbers() -> None:
    table = two_and_a_spare()
    table.begin()
    (answer,) = of(Answer, table.tell(ScaleRequest(number=7)))
    assert answer == Answer(7, ScaleAnswered(text="2 workers.", workers=2, servers=0))
    (answer,) = of(Answer, table.tell(ScaleRequest(number=8, workers=9)))
    assert answer.request == 8 and answer.answer.is_refused


def test_who_reads_nothing_of_what_it_is_told_is_ended() -> None:
    table = two_and_a_spare()
    table.begin()
    assert len(of(TakeStacks, table.tell(Deaf(WORKER_1)))) == 1
    asked = table.tell(StacksTaken({}))
    assert of(Signal, asked) == [Signal(WORKER_1, signal.SIGKILL)]
    assert events("hung", asked)[0]["reason"] == "it reads nothing of what it is told"


def test_hosts_that_do_not_say_where_processes_are_keep_nobody_who_hangs_alive() -> None:
    table = two_and_a_spare()
    table.begin()
    table.tell(Deaf(WORKER_1))
    assert not of(Signal, table.wait(4.9))
    assert of(Signal, table.wait(0.2)) == [Signal(WORKER_1, signal.SIGKILL)]


def test_what_nobody_understands_is_left_out_and_told_once_of_each() -> None:
    table = two_and_a_spare()
    table.begin()
    warned = [events("warning", table.say(WORKER_1, kind)) for kind in ("rumour", "steps", "rumour")]
    assert [len(one) for one in warned] == [1, 0, 0]
    assert "worker 1 said something" in warned[0][0]["text"] and "'rumour'" in warned[0][0]["text"]
    assert len(events("warning", table.say(WORKER_0, "state", state="dancing"))) == 1
    table.say(WORKER_0, "order", action="start", role="worker", rank=7)
    assert table.machine.over is None and table.machine.crew.hands[WORKER_1].is_alive, "the run goes on"


def test_whom_a_place_was_for_when_its_host_died_does_not_get_it_back_on_leaving() -> None:
    """Its end, with a place that it never took, would be taken for a failure of the run."""
    table = Table(Job(target="toy.py", cluster=Cluster(workers=4, threads=1)))
    table.begin()
    first, second, third, fourth, newcomer = range(5)
    table.tell(ScaleRequest(number=1, workers=2))
    for leaver, place, host in ((third, 2, first), (fourth, 3, second)):
        table.say(leaver, "released", places=[place])
        table.say(host, "adopted", places=[place])
        table.end(leaver)
    table.tell(ScaleRequest(number=2, workers=3))
    table.tell(Started(newcomer))
    (wish,) = of(Say, table.say(newcomer, "state", state="ready", step=0))
    assert wish.process == second and wish.word.places == [3]
    table.end(second, -signal.SIGKILL)
    table.say(newcomer, "adopted", places=[1, 3])
    table.say(newcomer, "state", state="training", step=0)
    (wish,) = of(Say, table.tell(ScaleRequest(number=3, workers=1)))
    assert wish.process == newcomer and wish.word.places == [1, 3]
    (gift,) = of(Say, table.say(newcomer, "released", places=[1, 3]))
    assert gift.process == first and gift.word.places == [1, 3]
    table.end(newcomer)
    assert not table.machine.has_failed


def test_a_death_that_others_would_have_made_good_is_not_the_cause() -> None:
    """They no longer do, because the run had failed before."""
    table = two_and_a_spare()
    table.begin()
    table.say(WORKER_0, "failed", message="The task is wrong.", traceback="")
    table.end(WORKER_1, -signal.SIGKILL)
    table.wait(0.3)
    table.end(WORKER_0, 1)
    table.end(SPARE, -signal.SIGTERM)
    assert table.machine.over is not None and str(table.machine.over.error) == "The task is wrong."
