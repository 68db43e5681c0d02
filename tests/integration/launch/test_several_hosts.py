"""Runs on several hosts: agents of this machine, each with processes, a segment and sockets of its own."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import ssh_server
from helpers.agents import SeenStarter, run_on_hosts, spread_cluster
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.etcd import running_etcd
from shoal.comm.security import RunKey
from shoal.errors import LaunchError
from shoal.launch.engines import starter_of
from shoal.launch.engines.by_hand import HandStarter
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.remote import callers
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.remote.starting import AgentHandle, AgentProcess, Candidate, Invitation, agent_command
from shoal.launch.runs import start, train
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


@pytest.mark.parametrize(
    ("strategy", "hosts", "workers", "task"),
    [
        ("ps:servers=2,wire=tcp", 2, 2, "mlp"),
        ("data", 3, 2, "mlp"),  # one of which has nobody
        ("data", 2, 4, "mlp"),
        ("data", 2, 2, "awkward"),  # some gradients are missing, when others have left already
        ("data", 3, 5, "awkward"),
        ("data", 2, 2, "checkpointed"),
        ("data:via=ring", 2, 2, "mlp"),
        ("tensor", 2, 2, "mlp"),
        ("mesh:data=2,tensor=2", 2, 4, "mlp"),
        ("mesh:data=2", 2, 2, "awkward"),
        ("mesh:data=3", 3, 3, "mlp"),
        ("mesh:data=2", 2, 2, "checkpointed"),
        ("average:every=4,outer=nesterov,inside=sharded,groups=2", 2, 4, "mlp"),
        pytest.param("average:every=4,inside=mesh:pipeline:2", 2, 4, "mlp", marks=pytest.mark.long),
        pytest.param("data:partition=relay", 2, 2, "mlp", marks=pytest.mark.long),
        pytest.param("sharded:stage=3", 2, 2, "mlp", marks=pytest.mark.long),
        pytest.param("pipeline", 2, 2, "mlp", marks=pytest.mark.long),
    ],
)
def test_the_bits_are_those_of_one_host(
    strategy: str, hosts: int, workers: int, task: str, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    cluster = spread_cluster(workers=workers, hosts=hosts)
    job = Job(target=f"{TASKS}:{task}", args={"steps": 6}, strategy=strategy, cluster=cluster)
    spread, events = run_on_hosts(job, tmp_path / "spread", hosts=hosts)
    (told,) = [event.values for event in events if event.kind == "world"]
    assert told["hosts"] == hosts and f"on {hosts} hosts (host-0, host-1" in told["text"]
    (tmp_path / "here").mkdir()
    here = Job(
        target=job.target,
        args=job.args,
        strategy=strategy,
        cluster=Cluster(workers=workers, threads=1),
        run_dir=str(tmp_path / "here"),
    )
    alone = Supervisor(here, lambda event: None, LocalEngine(zygote)).run()
    assert spread["digest"] == alone["digest"]
    assert spread["audit"]["clean"]
    if strategy.startswith("mesh:data") or (
        strategy == "data" and workers == 2
    ):  # who has fellows on its host may always be done before them
        leaves = task != "checkpointed"  # of that, gradients in every chunk come in parts
        assert (spread["early"] > 0) == leaves, "gradients leave while backward passes go on"


@pytest.mark.parametrize(
    ("victim", "roles"),
    [("host-0", ROLES), pytest.param("host-1", ROLES - {"coordinator"}, marks=pytest.mark.long)],
)
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


def test_a_coordinators_successor_on_another_host_finds_its_memory_in_etcd(tmp_path: Path) -> None:
    """And its standby is there at once. Nothing of it is on a disk that hosts would have to share, nor stays."""
    (tmp_path / "etcd").mkdir()
    with running_etcd(tmp_path / "etcd") as etcd:
        job = Job(
            target=str(COUNTING),
            args={"signs": str(tmp_path), "epochs": 4, "pause_s": 0.02},
            strategy="ps:servers=2,sync=asp,standby=1",
            cluster=replace(spread_cluster(workers=2), store=f"{etcd.url}/team"),
        )
        kept: list[int] = []

        def strike(event: Event, starter: SeenStarter) -> None:
            if event.kind == "steps" and not kept:
                kept.append(etcd.count_keys())
                starter.kill("host-0")
            elif event.kind == "replaced":
                (tmp_path / "hurry").touch()

        results, events = run_on_hosts(job, tmp_path / "run", on_event=strike)
        assert (kept, etcd.count_keys()) == ([2], 0)
    assert not (tmp_path / "run" / "coordinator.sqlite").exists()
    followed = [event.values["role"] for event in events if event.kind == "replaced"]
    assert followed[0] == "coordinator", "nobody is quicker"
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
    """A command that takes what ssh takes, and does what sshd would do, on this machine. A host is down where a
    file of its name says so."""
    script = folder / "ssh"
    down = f'[ ! -e {folder}/"$1".down ] || {{ echo "no route to host" >&2; exit 255; }}'
    script.write_text(f'#!/bin/sh\n{down}\nexec sh -c "exec $2"\n')
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


NEEDS_SSHD = pytest.mark.skipif(bool(ssh_server.why_not()), reason=ssh_server.why_not() or "it can be started")


@pytest.mark.long
@NEEDS_SSHD
def test_hosts_that_a_real_ssh_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose shell has another environment and another folder."""
    cluster = {"workers": 2, "threads": 1, "on": "ssh:127.0.0.1,localhost"}
    settings: dict[str, Any] = {"args": {"steps": 4}, "runs": tmp_path / "runs", "progress": False}
    with ssh_server.SshServer(tmp_path / "sshd") as server:
        monkeypatch.setenv(SSH_VARIABLE, server.command())
        run = train(f"{TASKS}:mlp", cluster=cluster, **settings)
    assert run.digest == train(f"{TASKS}:mlp", cluster={"workers": 2, "threads": 1}, **settings).digest


@NEEDS_SSHD
def test_a_host_that_does_not_know_this_users_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssh_server.SshServer(tmp_path / "sshd") as server:
        monkeypatch.setenv(SSH_VARIABLE, server.command("other_key"))
        cluster = Cluster(workers=2, on="ssh:127.0.0.1,localhost")
        sentence = r"Host 127\.0\.0\.1 could not join: .*Permission denied \(publickey\)"
        with pytest.raises(LaunchError, match=sentence):
            AgentEngine(starter_of(cluster, print)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("data:via=ring", 2), ("average:every=8,outer=nesterov,inside=sharded,groups=2", 4)],
)
def test_what_nobody_can_follow_goes_on_from_a_checkpoint_where_hosts_are_left(
    strategy: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits are those of a run that lost nobody: the same workers do the same on one host."""
    monkeypatch.setenv(SSH_VARIABLE, fake_ssh(tmp_path))
    settings: dict[str, Any] = {"strategy": strategy, "checkpoint": "every=25", "progress": False}
    settings |= {"runs": tmp_path / "runs", "args": {"steps": 200}}
    with start(
        f"{TASKS}:mlp", cluster={"workers": workers, "threads": 1, "on": "ssh:127.0.0.1,localhost"}, **settings
    ) as live:
        for event in live.events():
            if event.kind == "checkpoint":
                (tmp_path / "localhost.down").touch()
                kill_agent("localhost")
                break
        run = live.wait()
    told = (run.folder / "events.jsonl").read_text()
    assert "which was lost" in told and '"restarted"' in told
    assert "Host localhost could not join: no route to host The run goes on without it." in told
    quiet = train(f"{TASKS}:mlp", cluster={"workers": workers, "threads": 1}, name="quiet", **settings)
    assert run.digest == quiet.digest
    assert run.results["audit"] == quiet.results["audit"] and run.results["audit"]["clean"]


def kill_agent(name: str) -> None:
    """As if the power of its host failed."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--join" in words and words[-1] == name:
            process.kill()


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, fake_ssh(tmp_path))
    (tmp_path / "unreachable.down").touch()
    cluster = Cluster(workers=2, on="ssh:127.0.0.1,unreachable")
    with pytest.raises(LaunchError, match=r"^Host unreachable could not join: no route to host$"):
        AgentEngine(starter_of(cluster, print)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))


def test_a_coordinator_is_met_at_the_end_of_the_range_of_ports() -> None:
    """Other processes take the first free ones."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        last = taken.getsockname()[1]
        cluster = Cluster(workers=1, on="local:1", ports=f"{last - 20}-{last}")
        (host,) = AgentEngine(SeenStarter(1)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))
        host.close()
        assert last - 20 <= host.facts.port < last


def test_the_engine_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a command that stands for `podman exec -i NAME`."""
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\n[ "$1 $2" = "exec -i" ] || exit 2\nshift 3\nexec "$@"\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    job = Job(target="toy.py", strategy="ps", cluster=spread_cluster(workers=2))
    hosts = AgentEngine(names["make"]("left,right", print)).reserve(job)
    assert [host.facts.name for host in hosts] == ["left", "right"]
    for host in hosts:
        host.close()


def test_a_host_with_other_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {**callers.versions_here(), "torch": "1.0"}
    monkeypatch.setattr(callers, "versions_here", lambda: here)
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
        def start(self, invitation: Invitation) -> list[AgentHandle]:
            command = agent_command(invitation, Candidate(name="host-0"))
            self.stranger = AgentProcess.run("host-0", command, RunKey.create())
            return super().start(invitation)

    starter = WithStranger(1)
    job = Job(target="toy.py", strategy="ps", cluster=Cluster(workers=1, on="local:1"))
    (host,) = AgentEngine(starter).reserve(job)
    host.close()
    assert starter.stranger.process.wait(GUARD_S) == 1
    assert "could not join" in (starter.stranger.failure() or "")
    starter.stranger.close()
