"""A stage for runs with servers: the test writes what each role does, real processes do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.actors import ActorEngine, ActorHost
from shoal.launch.supervisor import Supervisor
from shoal.observe.events import Event
from shoal.observe.run_folder import RunFolder
from shoal.spec import Cluster, Job

ACTOR = """
import json, msgpack, os, pathlib, signal, socket, sys, threading, time
role, rank, node, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[5]), json.loads(sys.argv[4])
sock = socket.socket(fileno=int(sys.argv[3]))
sock.settimeout(30)

def say(kind, **values):
    sock.send(msgpack.packb({"kind": kind, **values}))

def hear(kind):
    while True:
        message = msgpack.unpackb(sock.recv(1 << 16) or sys.exit(1))
        if message["kind"] == kind:
            return message

def note(name, value=None):
    part = pathlib.Path(f".{name}-{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(name)

def await_note(name):
    deadline = time.monotonic() + 30
    while not pathlib.Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.005)

def await_end(name):
    await_note(name)
    process, deadline = f"/proc/{json.loads(pathlib.Path(name).read_text())}", time.monotonic() + 30
    while os.path.exists(process) and time.monotonic() < deadline:
        time.sleep(0.005)

def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fail(message, consequence=False):
    say("failed", message=message, traceback="trace", clear=False, consequence=consequence)
    sys.exit(1)

def start(role, rank):
    say("order", action="start", role=role, rank=rank)

def beat():
    while True:
        say("beat", step=0, rss=1)
        time.sleep(0.1)

threading.Thread(target=beat, daemon=True).start()
say("state", state="starting", step=0)
say("state", state="ready", step=0)
# Whoever ends before the coordinator can hear is not told of by name; see test_service_machine.py for that.
note("coordinator") if role == "coordinator" else node and await_note("coordinator")
exec(parts[role])
"""
COORDINATOR = 'say("done", results={"clean": True}); hear("stop")'
SERVER = 'hear("stop")'
WORKER = 'say("done", results={"rank": rank, "node": node})'


@dataclass
class Stage:
    """Runs a job of two servers and some workers in the current folder, and keeps what was told."""

    events: list[Event] = field(default_factory=list)
    engine: ActorEngine = field(default_factory=lambda: ActorEngine(ACTOR, {}))

    def __call__(
        self,
        *,
        coordinator: str = COORDINATOR,
        server: str = SERVER,
        worker: str = WORKER,
        workers: int = 2,
        strategy: str = "ps:servers=2,sync=asp",
        run_dir: str = "",
        on_event: Callable[[Event], None] = lambda event: None,
        hang_timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        self.engine = ActorEngine(ACTOR, {"coordinator": coordinator, "server": server, "worker": worker})
        job = Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=workers), run_dir=run_dir)
        if run_dir:
            Path(run_dir).mkdir()
            RunFolder(Path(run_dir)).write_job(job)

        def listen(event: Event) -> None:
            self.events.append(event)
            on_event(event)

        return Supervisor(job, listen, self.engine, hang_timeout_s=hang_timeout_s).run()

    @property
    def host(self) -> ActorHost:
        """The processes there have been."""
        assert self.engine.host is not None
        return self.engine.host

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What the events of a kind said."""
        return [event.values for event in self.events if event.kind == kind]

    def places(self) -> list[tuple[int, str, int]]:
        """Node, role and number of all processes there have been."""
        return [(world.node, world.role, world.global_rank) for world in self.host.worlds]

    @staticmethod
    def noted(name: str) -> Any:
        """What an actor noted."""
        return json.loads(Path(name).read_text())
