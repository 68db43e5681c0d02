"""Runs on a Ray cluster: nodes of this machine, one start of them for all tests here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.ray_nodes import RayNodes
from shoal.errors import LaunchError
from shoal.launch.engines import starter_of
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.runs import start, train
from shoal.spec import Cluster, Job

pytest.importorskip("ray", reason="Ray is not installed: pip install shoal[ray]")

TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"
GUARD_S = 60.0


@pytest.fixture(scope="module")
def nodes(zygote: ZygoteProcess) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv(ZYGOTE_VARIABLE, zygote.name)  # Agents on these nodes have it from them.
        with RayNodes() as started:
            for name, value in started.env.items():
                changes.setenv(name, value)
            yield started


def two_workers(on: str) -> dict[str, Any]:
    return {"cluster": {"workers": 2, "threads": 1, "on": on}, "progress": False}


def agents() -> list[psutil.Process]:
    """Of all that run on this machine: agents that actors have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "--join" in (words := process.info["cmdline"] or []) and "--owner" in words:
            found.append(process)
    return found


def test_the_bits_are_those_of_one_host(nodes: RayNodes, tmp_path: Path) -> None:
    """Which cluster is found as Ray finds it: nobody has named one."""
    settings: dict[str, Any] = {"strategy": "data", "args": {"steps": 6}, "runs": tmp_path}
    spread = train(f"{TASKS}:mlp", **settings, **two_workers("ray"))
    told = (spread.folder / "events.jsonl").read_text()
    assert "on 2 hosts (127.0.0." in told and spread.results["audit"]["clean"]
    here = train(f"{TASKS}:mlp", **settings, **two_workers("local"))
    assert spread.digest == here.digest
    assert not agents()


@pytest.mark.long
def test_what_the_cluster_lacks_is_said(nodes: RayNodes) -> None:
    started = time.monotonic()
    for on, sentence in [
        (
            "ray:nodes=2,resources=special:1",
            "The run asks for 1 CPU for each of 2 workers, 1 special on each node, 2 nodes, but the Ray cluster "
            "has 127.0.0.2 2 CPU and 0 special; 127.0.0.3 2 CPU and 1 special; ask for less",
        ),
        ("ray:127.0.0.1:1", r"Nobody listens for the Ray cluster at 127.0.0.1:1 \(Connection refused\)"),
    ]:
        cluster = Cluster(workers=2, threads=1, on=on)
        with pytest.raises(LaunchError, match=sentence):
            AgentEngine(starter_of(cluster, print)).reserve(Job(target="toy.py", strategy="ps", cluster=cluster))
    assert time.monotonic() - started < GUARD_S


@pytest.mark.long
def test_a_node_that_is_lost_and_one_that_comes(nodes: RayNodes, tmp_path: Path) -> None:
    """Under ps others do its work. What nobody can follow begins again, also on the node that has come."""
    with start(
        str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 4, "pause_s": 0.02},
        strategy="ps:servers=2,sync=asp",
        runs=tmp_path,
        **two_workers(f"ray:{nodes.address}"),
    ) as live:
        for event in live.events():
            if event.kind == "steps":
                nodes.remove(3)
                (tmp_path / "hurry").touch()
                break
        run = live.wait()
    assert "127.0.0.3" in (run.folder / "events.jsonl").read_text() and run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {4: 256}
    assert not agents()
    nodes.add(4)
    settings: dict[str, Any] = {"strategy": "data:via=ring", "checkpoint": "every=25", "runs": tmp_path}
    settings |= {"args": {"steps": 2000}}
    with start(f"{TASKS}:mlp", **settings, **two_workers("ray:nodes=2")) as live:
        for event in live.events():
            if event.kind == "checkpoint":
                nodes.add(5)
                nodes.remove(4)
                break
        run = live.wait()
    told = (run.folder / "events.jsonl").read_text()
    assert '"restarted"' in told and "127.0.0.5" in told
    assert run.digest == train(f"{TASKS}:mlp", **settings, **two_workers("local")).digest
    nodes.remove(5)
    nodes.add(3)


@pytest.mark.long
def test_a_node_is_taken_by_a_run_that_goes_on(nodes: RayNodes, tmp_path: Path) -> None:
    told: list[str] = []
    with start(
        str(COUNTING),
        args={"signs": str(tmp_path), "epochs": 60, "pause_s": 0.02},
        runs=tmp_path / "runs",
        **two_workers("ray"),
    ) as live:
        for event in live.events():
            if event.kind == "steps" and not told:
                assert live.scale(hosts="-1")["hosts"] == 1
                told.append("asked")
            elif event.kind == "replaced":
                with pytest.raises(LaunchError, match="2 more hosts were asked for, each with 1 CPU"):
                    live.scale(hosts="+2")
                live.scale(hosts="+1")
            elif event.kind == "scaled":
                (tmp_path / "hurry").touch()
            if event.kind in ("host", "replaced", "host_added", "scaled"):
                told.append(event.kind)
        run = live.wait()
    assert told == ["asked", "host", "replaced", "host_added", "scaled"]
    assert run.results["audit"]["clean"] and not agents()
    assert Counter(applied(run.folder / "model.safetensors")) == {60: 256}


@pytest.mark.long
def test_agents_end_with_what_started_them(nodes: RayNodes) -> None:
    """An actor's end, however it comes, is the agent's; and what the run held is free for the next."""
    cluster = Cluster(workers=4, threads=1, on="ray:auto")
    for _ in range(2):
        hosts = AgentEngine(starter_of(cluster, print)).reserve(
            Job(target="toy.py", strategy="ps", cluster=cluster)
        )
        running = agents()
        assert len(running) == len(hosts) == 2
        for agent in running:
            assert psutil.Process(agent.pid).environ().get("RAY_JOB_ID"), "an actor has started it"
        actor = running[0].parent()
        assert actor is not None
        actor.kill()
        assert running[0].wait(GUARD_S) is None or not running[0].is_running()
        for host in hosts:
            host.close()
        assert not agents()


@pytest.mark.long
def test_a_cluster_that_is_reached_by_rays_client(nodes: RayNodes, tmp_path: Path) -> None:
    from helpers.ray_nodes import client_server

    with client_server(nodes) as address:
        run = train(f"{TASKS}:mlp", strategy="ps", args={"steps": 3}, runs=tmp_path, **two_workers(address))
    assert run.results["audit"]["clean"] and not agents()
    assert "RAY_ADDRESS" not in os.environ


@pytest.mark.long
def test_a_whole_run_is_a_job_of_the_cluster(tmp_path: Path) -> None:
    """Its task comes from a folder that no node has looked into. The cluster is one node: two on one machine share
    the folder for what jobs bring, and one of them removes what the other uses."""
    (tmp_path / "mine").mkdir()
    shutil.copy(TASKS, tmp_path / "mine" / "small_tasks.py")
    with RayNodes(dashboard=True, nodes=1) as nodes:
        command = [
            sys.executable,
            "-m",
            "shoal.cli",
            "submit",
            "mine/small_tasks.py:mlp",
            "-w",
            "2",
            "--threads",
            "1",
        ]
        command += ["--on", f"ray:{nodes.dashboard},nodes=1", "--arg", "steps=3", "--name", "sent"]
        env = {**os.environ, **nodes.env}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "raysubmit_" in done.stdout and "2 workers" in done.stdout
        assert '"on": "ray:nodes=1"' in (tmp_path / "runs" / "sent" / "job.json").read_text()
        assert (tmp_path / "runs" / "sent" / "model.safetensors").exists()
        left = subprocess.run([*command[:-1], "again", "--no-wait", "--max-steps", "none"], cwd=tmp_path, env=env)
        assert left.returncode == 2, "what train does not understand is refused before anything is sent"
