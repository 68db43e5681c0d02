"""A spare takes a dead worker's place: the supervisor's part, with an engine of small plain processes."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helpers.actors import ActorEngine
from shoal.errors import WorkerFailed
from shoal.launch.supervisor import Supervisor
from shoal.observe.events import Event
from shoal.spec import Cluster, Job

ACTOR = """
import json, msgpack, os, pathlib, signal, socket, sys, time
role, number, fates = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[4])
sock = socket.socket(fileno=int(sys.argv[3]))
sock.setblocking(True)

def say(**message):
    sock.send(msgpack.packb(message))

def meet(fate):
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "raise":
        say(kind="failed", message="my own fault", traceback="trace", clear=False)
        sys.exit(1)

if role == "spare":
    meet(fates.get(f"starting {number}"))
    say(kind="state", state="ready", step=0)
    order = msgpack.unpackb(sock.recv(4096))
    pathlib.Path(f"order-{number}.json").write_text(json.dumps(order))
    meet(fates.get(f"spare {number}"))
    number = order["places"][0]
    say(kind="adopted", places=order["places"], generation=order["generation"])
    say(kind="state", state="training", step=order["generation"])
else:
    say(kind="state", state="ready", step=0)
    meet(fates.get(f"worker {number}"))
say(kind="done", results={"rank": number})
meet(fates.get(f"done {number}"))
"""


@dataclass
class Stage:
    """Runs a job of two workers and a spare, whose fates are given."""

    events: list[Event] = field(default_factory=list)
    engine: ActorEngine = field(default_factory=lambda: ActorEngine(ACTOR, {}))

    def __call__(self, **fates: str) -> dict:
        self.engine = ActorEngine(ACTOR, {name.replace("_", " "): fate for name, fate in fates.items()})
        job = Job(target="toy.py", cluster=Cluster(workers=2, spares=1))
        return Supervisor(job, self.events.append, self.engine).run()

    def told(self, kind: str) -> list[dict]:
        return [event.values for event in self.events if event.kind == kind]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    return Stage()


def _order(number: int) -> dict:
    return json.loads(Path(f"order-{number}.json").read_text())


def test_nobody_is_replaced_without_need(play: Stage) -> None:
    assert play() == {"rank": 0}
    assert not play.told("lost") and not play.told("replaced")
    assert len(play.engine.host.processes) == 3
    assert play.told("world")[0]["text"].startswith("2 workers and 1 spare on 1 host")


def test_a_spare_takes_the_place_of_a_killed_worker(play: Stage) -> None:
    assert play(worker_0="die") == {"rank": 0}, "the successor's results count"
    assert _order(0) == {"kind": "takeover", "places": [0], "generation": 1}
    (lost,) = play.told("lost")
    assert lost["rank"] == 0 and "SIGKILL" in lost["reason"]
    (replaced,) = play.told("replaced")
    assert (replaced["rank"], replaced["spare"]) == (0, 0) and 0 < replaced["seconds"] < 60
    kinds = [event.kind for event in play.events if event.rank == 0 and event.kind != "beat"]
    assert kinds[-6:] == ["state", "lost", "replaced", "adopted", "state", "done"]


def test_a_fresh_spare_follows_and_takes_the_next_place(play: Stage) -> None:
    play(worker_0="die", worker_1="die")
    assert {*_order(0)["places"], *_order(1)["places"]} == {0, 1}
    assert [_order(number)["generation"] for number in range(2)] == [1, 2]
    assert len(play.told("lost")) == len(play.told("replaced")) == 2
    assert [world.role for world in play.engine.host.worlds].count("spare") == 3, "one waits at the end"


def test_a_failure_of_the_users_code_is_not_replaced(play: Stage) -> None:
    with pytest.raises(WorkerFailed, match="my own fault") as raised:
        play(worker_1="raise")
    assert (raised.value.global_rank, raised.value.details) == (1, "trace")
    assert not play.told("lost")


def test_successors_that_all_die_are_not_followed_for_ever(play: Stage) -> None:
    with pytest.raises(WorkerFailed, match="Worker 1 was killed"):
        play(worker_1="die", **{f"spare_{number}": "die" for number in range(20)})
    assert len(play.told("lost")) == 10, "max_failures"
    assert not play.told("replaced")


def test_a_dead_spare_is_followed_by_another(play: Stage) -> None:
    play(starting_0="die", worker_0="die")
    assert any("Spare 0 was killed" in warning["text"] for warning in play.told("warning"))
    assert play.told("replaced")[0]["spare"] == 1


def test_a_worker_that_dies_after_its_work_is_not_missed(play: Stage) -> None:
    assert play(done_0="die") == {"rank": 0}
    assert not play.told("lost")
    (warning,) = play.told("warning")
    assert warning["text"].startswith("after its work was done: Worker 0 was killed")


def test_all_processes_have_ended_when_the_run_has(play: Stage) -> None:
    play(worker_1="die")
    assert all(process.returncode is not None for process in play.engine.host.processes)
    assert -signal.SIGKILL in [process.returncode for process in play.engine.host.processes]
