"""Runs with servers: the coordinator decides, the supervisor carries it out. Every fault is a real one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from service_stage import COORDINATOR, WORKER, Stage

from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.worlds import plan_worlds
from shoal.observe.events import Event
from shoal.observe.wording import line
from shoal.spec import Cluster, Job

KILLED = -signal.SIGKILL
REPLACING = """
lost = hear("lost")
note("lost", lost)
start(lost["role"], lost["rank"])
say("done", results={"clean": True})
hear("stop")
"""
AFTER_THE_LOSS = f'await_note("lost"); {WORKER}'
BEGINNING = [(0, "coordinator", 0), (1, "server", 0), (2, "server", 1), (3, "worker", 0), (4, "worker", 1)]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    # Whoever starts late on a busy machine still gets to its last line.
    monkeypatch.setattr("shoal.launch.service._CLOSE_S", 30.0)
    return Stage()


def test_a_calm_run(play: Stage) -> None:
    assert play() == {"rank": 0, "node": 3, "audit": {"clean": True}}
    assert play.places() == BEGINNING
    assert play.told("world")[0]["text"].startswith("2 workers, 2 servers and a coordinator on 1 host, ")
    assert play.told("audit") == [{"clean": True}]
    assert [process.returncode for process in play.host.processes] == [0] * 5, "all ended when asked"
    assert not {event.kind for event in play.events} & {"lost", "replaced", "warning", "failed"}


def test_the_secret_is_shared_and_never_told(play: Stage) -> None:
    play()
    (secret,) = {world.secret for world in play.host.worlds}
    assert len(bytes.fromhex(secret)) == 32
    assert secret not in "".join(map(repr, play.host.worlds)) + "".join(e.to_json() for e in play.events)


def test_a_killed_server_is_replaced_on_order(play: Stage) -> None:
    server = 'if rank == 1: die() if once("died") else note("back")\nhear("stop")'
    results = play(coordinator=REPLACING, server=server, worker=f'await_note("back"); {WORKER}')
    assert results["audit"] == {"clean": True}
    assert play.host.exit_codes("server") == [0, KILLED, 0]
    assert play.noted("lost") == {"kind": "lost", "node": 2, "role": "server", "rank": 1}
    assert play.places() == [*BEGINNING, (5, "server", 1)]
    (lost,), (replaced,) = play.told("lost"), play.told("replaced")
    assert "Server 1 was killed from outside (SIGKILL)" in lost["reason"]
    assert (replaced["role"], replaced["rank"], replaced["node"]) == ("server", 1, 5)
    assert 0 < replaced["seconds"] < 30


@pytest.mark.parametrize(
    ("end", "reason"),
    [("die()", "SIGKILL"), ("sys.exit(3)", "exit code 3"), ('fail("no answer", consequence=True)', "no answer")],
)
def test_a_lost_worker_is_replaced_on_order(play: Stage, end: str, reason: str) -> None:
    worker = f'if rank == 0 and once("died"): {end}\n{AFTER_THE_LOSS}'
    results = play(coordinator=REPLACING, worker=worker, workers=1)
    assert results["node"] == 4, "the successor's results count, and its number is a new one"
    assert play.noted("lost") == {"kind": "lost", "node": 3, "role": "worker", "rank": 0}
    (lost,) = play.told("lost")
    assert reason in lost["reason"]
    said = [event.values.get("state", event.kind) for event in play.events if event.rank == 0]
    told = [word for word in said if word != "beat"]
    assert told == ["starting", "ready", "lost", "starting", "replaced", "ready", "done"]


@pytest.mark.parametrize("role", ["worker", "server", "coordinator"])
def test_whoever_reports_a_failure_ends_the_run(play: Stage, role: str) -> None:
    parts = {"worker": 'hear("stop")', role: f'fail("the {role}\'s own fault")'}
    with pytest.raises(WorkerFailed, match=f"the {role}'s own fault") as raised:
        play(**parts)
    assert raised.value.details == "trace"
    assert not play.told("lost")
    assert all(process.returncode is not None for process in play.host.processes)


def test_a_killed_coordinator_is_followed_by_another(play: Stage) -> None:
    coordinator = """
if once("died"):
    start("server", 2)
    die()
note("living", msgpack.unpackb(sock.recv(1 << 16)))
say("done", results={"clean": True})
hear("stop")
"""
    assert play(coordinator=coordinator, worker=f'await_note("living"); {WORKER}')["audit"] == {"clean": True}
    assert play.host.exit_codes("coordinator") == [KILLED, 0]
    assert play.places() == [*BEGINNING, (5, "server", 2), (0, "coordinator", 0)], "its last order was obeyed"
    assert len({world.coordinator for world in play.host.worlds}) == 1, "all meet at the same address"
    living = play.noted("living")
    assert (living["kind"], [one["node"] for one in living["members"]]) == ("living", [1, 2, 3, 4, 5])
    assert living["members"][-1] == {"node": 5, "role": "server", "rank": 2}
    assert [event["role"] for kind in ("lost", "replaced") for event in play.told(kind)] == ["coordinator"] * 2


def test_coordinators_that_all_die_are_not_followed_for_ever(play: Stage) -> None:
    with pytest.raises(WorkerFailed, match="It was failure number 11 within a minute"):
        play(coordinator="die()", worker='hear("stop")')
    assert play.host.exit_codes("coordinator") == [KILLED] * 11


def test_a_dismissed_server_is_no_loss(play: Stage) -> None:
    coordinator = f'await_note("pid-2"); say("order", action="end", role="server", rank=1, node=2); {COORDINATOR}'
    server = 'note(f"pid-{node}", os.getpid()); hear("stop")'
    play(coordinator=coordinator, server=server, worker=f'await_end("pid-2"); {WORKER}')
    assert play.host.exit_codes("server") == [0, 0]
    assert not play.told("lost")


def test_whoever_does_not_end_when_dismissed_is_killed(play: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.dismissals._PATIENCE_S", 0.2)
    # Nobody else ends before: worker 0 waits until the run is otherwise over.
    coordinator = (
        'say("order", action="end", role="worker", rank=0, node=3); say("done", results={}); hear("stop")'
    )
    worker = 'time.sleep(60) if rank == 0 else say("done", results={})'
    play(coordinator=coordinator, worker=worker)
    assert play.host.exit_codes("worker") == [KILLED, 0]
    assert not play.told("lost")
    assert [warning["text"] for warning in play.told("warning")] == [
        "worker 0 did not end within 0 s of being asked and was killed."
    ]


def test_a_decision_is_told(play: Stage) -> None:
    play(coordinator=f'say("decision", text="worker 1 gets more data", share=3); {COORDINATOR}')
    (event,) = [event for event in play.events if event.kind == "decision"]
    assert event.values == {"text": "worker 1 gets more data", "share": 3}
    assert line(event) == "coordinator: worker 1 gets more data"


def test_a_run_without_an_audit_fails(play: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.service.AUDIT_TIMEOUT_S", 0.2)
    with pytest.raises(WorkerFailed, match="did not say what it counted within 0 s of the workers' end"):
        play(coordinator='hear("stop")')
    assert {done["results"]["rank"] for done in play.told("done")} == {0, 1}


@pytest.mark.long
def test_a_coordinator_that_follows_after_the_workers_end_has_its_own_time(
    play: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one dies after more than half of the time, and the second one needs more than the rest."""
    monkeypatch.setattr("shoal.launch.service.AUDIT_TIMEOUT_S", 2.0)
    coordinator = f"""
if once("died"):
    await_end("last worker")
    time.sleep(1.2)
    die()
time.sleep(1.0)
{COORDINATOR}
"""
    worker = f'note("last worker", os.getpid()); {WORKER}'
    assert play(coordinator=coordinator, worker=worker, workers=1)["audit"] == {"clean": True}
    assert not play.told("warning")


@pytest.mark.parametrize("coordinator", ['hear("stop")', COORDINATOR])
def test_a_first_worker_that_nobody_replaces(
    play: Stage, monkeypatch: pytest.MonkeyPatch, coordinator: str
) -> None:
    monkeypatch.setattr("shoal.launch.service.AUDIT_TIMEOUT_S", 0.2)
    with pytest.raises(WorkerFailed, match="Worker 0 was killed from outside"):
        play(coordinator=coordinator, worker=f"if rank == 0: die()\n{WORKER}")
    assert len(play.told("lost")) == 1


def test_a_last_worker_may_be_missed(play: Stage) -> None:
    coordinator = f'hear("lost"); {COORDINATOR}'
    assert play(coordinator=coordinator, worker=f"if rank == 1: die()\n{WORKER}")["rank"] == 0
    assert len(play.told("lost")) == 1 and not play.told("replaced")


def test_servers_may_leave_once_the_work_is_done(play: Stage) -> None:
    server = 'note(f"pid-{node}", os.getpid()); await_note("over")'
    worker = 'say("done", results={}); note("over"); await_end("pid-1"); await_end("pid-2")'
    play(server=server, worker=worker, workers=1)
    assert play.host.exit_codes("server") == [0, 0]
    assert not play.told("lost")


def test_servers_that_leave_before_are_lost(play: Stage) -> None:
    server = 'if rank == 0 and once("left"): sys.exit(0)\nhear("stop")'
    play(coordinator=REPLACING, server=server, worker=AFTER_THE_LOSS)
    (lost,) = play.told("lost")
    assert lost["reason"].startswith("Server 0 ended with exit code 0 before its work was done")


def interrupt(event: Event) -> None:
    """Ctrl-C, once the world is formed."""
    if event.kind == "world":
        os.kill(os.getpid(), signal.SIGINT)


def test_a_request_to_stop_reaches_the_workers_and_the_rest_follows(play: Stage) -> None:
    coordinator = 'await_end("pid-3"); start("worker", 0); note("missed"); hear("stop")'
    worker = 'note(f"pid-{node}", os.getpid()); hear("stop"); rank == 0 or await_note("missed")'
    with pytest.raises(Interrupted, match="after the step it was in"):
        play(coordinator=coordinator, worker=worker, on_event=interrupt)
    assert play.places() == BEGINNING, "nobody follows a worker that has stopped on request"
    assert [process.returncode for process in play.host.processes] == [0] * 5
    assert not play.told("lost")


def test_who_follows_a_worker_that_dies_while_stopping_stops_too(play: Stage) -> None:
    worker = f'hear("stop")\nif rank == 0 and once("died"): die()\n{WORKER}'
    with pytest.raises(Interrupted, match="after the step it was in"):
        play(coordinator=REPLACING, worker=worker, on_event=interrupt)
    assert play.host.exit_codes("worker") == [KILLED, 0, 0]
    assert len(play.told("lost")) == len(play.told("replaced")) == 1


def test_a_hanging_server_is_ended_and_told_as_lost(play: Stage) -> None:
    server = 'if rank == 0 and once("hangs"): os.kill(os.getpid(), signal.SIGSTOP)\nhear("stop")'
    play(coordinator=REPLACING, server=server, worker=AFTER_THE_LOSS, hang_timeout_s=2.0)
    assert play.noted("lost")["node"] == 1
    assert "gave no sign of life" in play.told("lost")[0]["reason"]
    assert play.host.exit_codes("server")[0] == KILLED


def test_lines_of_servers_carry_their_name(play: Stage) -> None:
    play(server='say("line", text="here", level="info"); hear("stop")')
    assert {told["text"] for told in play.told("line")} == {"server 0: here", "server 1: here"}


def test_without_a_run_folder_the_coordinator_has_a_place_while_the_run_lasts(play: Stage) -> None:
    found: list[bool] = []

    def look(event: Event) -> None:
        if event.kind == "world":
            found.append(Path(play.engine.job.options["scratch"]).is_dir())

    play(on_event=look)
    assert found == [True]
    assert not Path(play.engine.job.options["scratch"]).exists()


def test_every_process_has_its_log(tmp_path: Path, zygote: ZygoteProcess) -> None:
    job = Job(target="toy.py", strategy="ps:servers=2", cluster=Cluster(workers=1), run_dir=str(tmp_path / "run"))
    host = LocalEngine(zygote).open(job)
    try:
        for number, world in enumerate(plan_worlds(job)):
            host.start(number, world)
        names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
        assert names == {"coordinator-0.log", "server-0.log", "server-1.log", "rank-0.log"}
    finally:
        host.close()
