"""`kill -9` of any process of a run at any moment: no process, segment or port of it remains.

Each run is a real supervisor in its own process. Its workers never end by themselves, so every run ends by
its fault; rank 0 has a child of its own, and every worker listens on loopback.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from remains import children_of, left_by, processes_in

from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess, start_zygote
from shoal.launch.supervisor import Supervisor
from shoal.spec import Cluster, Job

WORK = """
import os, pathlib, socket, time, torch
server = socket.create_server(("127.0.0.1", 0))
pathlib.Path(f"port-{os.environ['RANK']}").write_text(str(server.getsockname()[1]))
if os.environ["RANK"] == "0" and os.fork() == 0:
    time.sleep(600)
weights = torch.randn(32, 32)
while True:
    weights = torch.tanh(weights @ weights)
    time.sleep(0.002)
"""
WORKERS = 2
WARM_LENGTH_S, COLD_LENGTH_S = 0.2, 2.5
GUARD_S = 60.0


@dataclass
class Run:
    """A supervisor in a process of its own, and how it ended."""

    folder: Path
    pid: int

    @classmethod
    def start(cls, folder: Path, zygote: ZygoteProcess | None) -> Run:
        """Fork a supervisor. This process has everything imported, so that a hundred of them are cheap."""
        folder.mkdir()
        (folder / "work.py").write_text(WORK)
        pid = os.fork()
        if pid == 0:
            try:
                os.chdir(folder)
                _supervise(folder, zygote)
            finally:
                os._exit(1)
        return cls(folder, pid)

    def wait(self) -> int:
        """The supervisor's exit code; negative for a signal."""
        deadline = time.monotonic() + GUARD_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)

    def error(self) -> str:
        """What the supervisor raised."""
        return (self.folder / "error").read_text()


def _supervise(folder: Path, zygote: ZygoteProcess | None) -> None:
    cluster = Cluster(workers=WORKERS, threads=1)
    job = Job(target="work.py", purpose="script", cluster=cluster, run_dir=str(folder / "run"))
    try:
        Supervisor(job, lambda event: None, LocalEngine(zygote)).run()
    except Exception:
        (folder / "error").write_text(traceback.format_exc().splitlines()[-1])


@dataclass(frozen=True)
class Fault:
    """Which process to kill, and when."""

    victim: str
    moment_s: float
    pick: int
    """Decides among several."""

    def strike(self, run: Run, zygote: ZygoteProcess | None) -> None:
        """Kill the victim; the run must be there to be hit, and must end as that demands."""
        time.sleep(self.moment_s)
        os.kill(self._find(run, zygote), signal.SIGKILL)
        code = run.wait()
        if self.victim == "supervisor":
            assert code == -signal.SIGKILL
            return
        assert code == 1, "the supervisor did not end by itself"
        expected = "WorkerFailed: Worker" if self.victim == "worker" else "LaunchError: The zygote"
        assert expected in run.error()

    def _find(self, run: Run, zygote: ZygoteProcess | None) -> int:
        """The process to kill; waits until there is one."""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            zygotes = {zygote.pid} if zygote is not None else children_of(run.pid)
            if self.victim == "supervisor":
                found = {run.pid}
            elif self.victim == "zygote":
                found = zygotes
            else:
                # A zygote that has just loaded may still be forking for a run that is gone already.
                found = processes_in(run.folder) & {pid for parent in zygotes for pid in children_of(parent)}
            if found:
                return sorted(found)[self.pick % len(found)]
            time.sleep(0.002)
        raise AssertionError(f"no {self.victim} to kill within {GUARD_S} s")


def _plan(seed: int, count: int, share_of_zygotes: float, length_s: float) -> list[Fault]:
    chance = random.Random(seed)
    others = (1 - share_of_zygotes) / 2
    weights = {"worker": others, "supervisor": others, "zygote": share_of_zygotes}
    victims = chance.choices(list(weights), list(weights.values()), k=count)
    assert set(victims) == set(weights), "choose a seed that hits every kind"
    return [Fault(victim, chance.uniform(0, length_s), chance.randrange(WORKERS)) for victim in victims]


@pytest.fixture
def doomed() -> Iterator[list[ZygoteProcess]]:
    """Zygotes that are there to be killed."""
    pool: list[ZygoteProcess] = []
    yield pool
    for zygote in pool:
        zygote.close()


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.long)])
def test_runs_on_a_warm_zygote(
    tmp_path: Path, zygote: ZygoteProcess, doomed: list[ZygoteProcess], count: int
) -> None:
    plan = _plan(seed=38, count=count, share_of_zygotes=0.06, length_s=WARM_LENGTH_S)
    for number, fault in enumerate(plan):
        if not doomed and any(later.victim == "zygote" for later in plan[number : number + 10]):
            doomed.append(start_zygote())  # it loads while others are in use
        used = doomed[0] if fault.victim == "zygote" else zygote
        run = Run.start(tmp_path / str(number), used)
        fault.strike(run, used)
        if used is not zygote:
            doomed.pop().close()
        remains = left_by(run.folder, run.pid, zygote.pid)
        assert not remains, f"run {number}: {fault} left {remains}"


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.long)])
def test_cold_runs(tmp_path: Path, count: int) -> None:
    for number, fault in enumerate(_plan(seed=14, count=count, share_of_zygotes=0.34, length_s=COLD_LENGTH_S)):
        run = Run.start(tmp_path / str(number), None)
        fault.strike(run, None)
        remains = left_by(run.folder, run.pid, None)
        assert not remains, f"run {number}: {fault} left {remains}"
