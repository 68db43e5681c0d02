"""Engines that have more hosts for a run that goes on: those that are not there, and those that were added."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from shoal.comm.security import RunKey
from shoal.errors import LaunchError
from shoal.launch.engines.mpi import MpiStarter
from shoal.launch.engines.slurm import SlurmStarter
from shoal.launch.engines.ssh import SSH_VARIABLE, make, make_listed
from shoal.launch.remote.starting import AgentProcess, GrowingStarter, Invitation
from shoal.spec import Cluster

Grow = Callable[[GrowingStarter, int, Collection[str]], list[str]]


@pytest.fixture
def grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grow:
    """Has more hosts started by commands that do nothing; their names."""
    for name in ("ssh", "srun", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(SSH_VARIABLE, raising=False)
    invitation = Invitation(address="tcp://127.0.0.1:1", key=RunKey.create(), cluster=Cluster())

    def grown(starter: GrowingStarter, count: int, there: Collection[str]) -> list[str]:
        assert isinstance(starter, GrowingStarter)
        agents = starter.more(invitation, count, there)
        for agent in agents:
            agent.close()
        return [agent.name for agent in agents]

    return grown


def test_those_that_were_named_and_are_not_there(grow: Grow) -> None:
    assert grow(make("a,b,c", print), 1, {"a", "c"}) == ["b"]
    assert grow(MpiStarter(["a", "b"], ["mpirun"]), 1, {"a"}) == ["b"]
    assert grow(SlurmStarter(["n1", "n2", "n3"], [2, 4, 8]), 2, {"n1"}) == ["n2", "n3"]


def test_those_that_were_added_to_a_file(grow: Grow, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    starter = make_listed(str(hosts), print)
    with pytest.raises(
        LaunchError, match=f"2 more hosts were asked for, but .* 0 are not there; add lines to {hosts}"
    ):
        grow(starter, 2, {"a", "b"})
    hosts.write_text("a\nb\nc cores=2\nd\n")
    assert grow(starter, 2, {"a", "b"}) == ["c", "d"]


def test_an_allocation_has_no_more_than_it_has(grow: Grow) -> None:
    with pytest.raises(
        LaunchError, match=r"1 more hosts were asked for, .*; ask for more with `shoal slurm --nodes`"
    ):
        grow(SlurmStarter(["n1"]), 1, {"n1"})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("Traceback\n  File\nerror: no route to host", "no route to host"),
        (
            "ssh: no route to host\n-----\nA daemon could not be started.\nThis may be\n-----",
            "ssh: no route to host",
        ),
        ("", r"its agent ended with status 3\."),
    ],
)
def test_why_a_host_could_not_join(said: str, sentence: str) -> None:
    """The last words of what was to start it; where a launcher draws a box around its advice, the first."""
    agent = AgentProcess.run("a", ["sh", "-c", f"printf '%s' '{said}' >&2; exit 3"], RunKey.create())
    agent.process.wait()
    assert re.fullmatch(f"Host a could not join: {sentence}", agent.failure() or "")
    agent.close()
