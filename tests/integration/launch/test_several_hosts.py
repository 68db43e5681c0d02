"""Runs on several hosts: agents of this machine, each with processes, a segment and sockets of its own."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.agents import SeenStarter, run_on_hosts, spread_cluster
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from shoal.comm.security import RunKey
from shoal.errors import LaunchError
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.remote import gathering
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.remote.starting import (
    SSH_VARIABLE,
    AgentHandle,
    AgentProcess,
    Candidate,
    HandStarter,
    agent_command,
    starter_of,
)
from shoal.launch.runs import train
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"
GUARD_S = 60.0
ROLES = {"coordinator", "server", "worker"}


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents take it from their environment: so tests need not load torch for each."""
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


@pytest.mark.parametrize("strategy", ["ps:servers=2,wire=tcp", "data:via=ring"])
def test_the_bits_are_those_of_one_host(strategy: str, tmp_path: Path, zygote: ZygoteProcess) -> None:
    job = Job(target=f"{TASKS}:mlp", strategy=strategy, cluster=spread_cluster(workers=2))
    spread, events = run_on_hosts(job, tmp_path / "spread")
    (told,) = [event.values for event in events if event.kind == "world"]
    assert told["hosts"] == 2 and "on 2 hosts (host-0, host-1)" in told["text"]
    (tmp_path / "here").mkdir()
    here = Job(
        target=job.target,
        strategy=strategy,
        cluster=Cluster(workers=2, threads=1),
        run_dir=str(tmp_path / "here"),
    )
    alone = Supervisor(here, lambda event: None, LocalEngine(zygote)).run()
    assert spread["digest"] == alone["digest"]
    assert spread["audit"]["clean"]


@pytest.mark.parametrize(("victim", "roles"), [("host-0", ROLES), ("host-1", ROLES - {"coordinator"})])
def test_a_lost_host_costs_no_update(victim: str, roles: set[str], tmp_path: Path) -> None:
    """Its server's shards are served by their backups, its worker's work is done by others; and a coordinator is
    followed elsewhere, where all others find it."""
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 4, "pause_s": 0.02},
        strategy="ps:servers=2,sync=asp",
        cluster=spread_cluster(workers=2),
    )
    lost: list[str] = []

    def strike(event: Event, starter: SeenStarter) -> None:
        if event.kind == "steps" and not lost:
            lost.append(victim)
            starter.kill(victim)
        elif event.kind == "replaced":
            (tmp_path / "hurry").touch()

    results, events = run_on_hosts(job, tmp_path / "run", on_event=strike)
    (gone,) = [event.values for event in events if event.kind == "host"]
    assert (gone["name"], gone["processes"]) == (victim, len(roles))
    assert "the connection to it has ended" in gone["reason"]
    assert {event.values["role"] for event in events if event.kind == "lost"} == roles
    assert results["audit"]["clean"]
    assert Counter(applied(tmp_path / "run" / "model.safetensors")) == {4: 256}


def test_agents_end_what_they_started_when_nobody_is_heard(tmp_path: Path) -> None:
    """A link that was cut looks so to both ends: here nobody answers the agent's beats."""
    script = tmp_path / "stays.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = Job(target=str(script), purpose="script", cluster=Cluster(workers=1, threads=1))  # type: ignore[arg-type]
    starter = SeenStarter(1)
    (host,) = AgentEngine(starter, lease_s=0.5).reserve(job)
    try:
        agent = starter.agents["host-0"]
        assert agent.process.wait(GUARD_S) == 1
        assert "has not been heard" in (agent.failure() or "")
        with pytest.raises(
            LaunchError, match=r"Host host-0 \(127.0.0.1\) is gone: the connection to it has ended"
        ):
            while True:
                host.collect()
    finally:
        host.close()


def fake_ssh(folder: Path) -> str:
    """A command that takes what ssh takes, and does what sshd would do, on this machine."""
    script = folder / "ssh"
    script.write_text(
        '#!/bin/sh\n[ "$1" != unreachable ] || { echo "no route to host" >&2; exit 255; }\nexec sh -c "$2"\n'
    )
    script.chmod(0o755)
    return str(script)


def test_hosts_that_ssh_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, fake_ssh(tmp_path))
    listed = tmp_path / "hosts"
    listed.write_text("127.0.0.1 cores=2  # the first\n\nlocalhost cores=6 address=127.0.0.1\n")
    run = train(
        f"{TASKS}:mlp",
        strategy="ps",
        cluster={"workers": 4, "threads": 1, "on": f"hosts:{listed}"},
        name="reached",
        runs=tmp_path / "runs",
        progress=False,
        max_steps=3,
    )
    assert run.results["steps"] == 3 and run.results["audit"]["clean"]
    told = (run.folder / "events.jsonl").read_text()
    assert "on 2 hosts (127.0.0.1, localhost)" in told


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, fake_ssh(tmp_path))
    cluster = Cluster(workers=2, on="ssh:127.0.0.1,unreachable")
    with pytest.raises(LaunchError, match=r"^Host unreachable could not join: no route to host$"):
        AgentEngine(starter_of(cluster, print)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))


def test_a_host_with_other_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {**gathering.versions_here(), "torch": "1.0"}
    monkeypatch.setattr(gathering, "versions_here", lambda: here)
    job = Job(target="toy.py", strategy="ps", cluster=spread_cluster(workers=2))
    with pytest.raises(LaunchError, match=r"^Host host-\d has torch .*, but this one has 1.0; install the same"):
        AgentEngine(SeenStarter(2)).reserve(job)


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = SeenStarter(2, patience_s=0.01)
    job = Job(target="toy.py", strategy="ps", cluster=spread_cluster(workers=2))
    with pytest.raises(LaunchError, match=r"host-0, host-1 did not join within 0 s; see whether tcp://127.0.0.1:"):
        AgentEngine(starter).reserve(job)


def test_hosts_join_by_hand_with_a_ticket() -> None:
    """The ticket is a file that only this user can read, and is gone once all have joined."""
    agents: list[subprocess.Popen[bytes]] = []
    tickets: list[Path] = []

    def by_hand(line: str) -> None:
        words = shlex.split(line.partition("shoal host ")[2])[:4]
        tickets.append(Path(words[3]))
        assert stat.S_IMODE(tickets[0].stat().st_mode) == 0o600
        command = [sys.executable, "-m", "shoal.cli", "host", *words, "--name", "by-hand"]
        agents.append(subprocess.Popen(command))

    job = Job(target="toy.py", strategy="ps", cluster=Cluster(workers=2, on="join:1", interface="127.0.0.1"))
    (host,) = AgentEngine(HandStarter(1, by_hand)).reserve(job)
    assert host.facts.name == "by-hand" and not tickets[0].exists()
    host.close()
    assert agents[0].wait(GUARD_S) == 0


def test_whoever_has_another_key_is_refused() -> None:
    """A stranger among the hosts of a run: it is told so, and the run does not notice."""

    class WithStranger(SeenStarter):
        def start(self, address: str, key: RunKey) -> list[AgentHandle]:
            command = agent_command(address, Candidate(name="host-0"))
            self.stranger = AgentProcess.run("host-0", command, RunKey.create())
            return super().start(address, key)

    starter = WithStranger(1)
    job = Job(target="toy.py", strategy="ps", cluster=Cluster(workers=1, on="local:1"))
    (host,) = AgentEngine(starter).reserve(job)
    host.close()
    assert starter.stranger.process.wait(GUARD_S) == 1
    assert "could not join" in (starter.stranger.failure() or "")
    starter.stranger.close()
