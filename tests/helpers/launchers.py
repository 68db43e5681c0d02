"""Launchers of other people, which start `shoal train` in several processes, as if on two hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.commands import command
from shoal.launch.runs import train
from shoal.observe import RunFolder

GUARD_S = 120.0
TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
TASK = [f"{TASKS}:mlp", "--arg", "steps=6", "--plain", "--threads", "1"]
DIGITS = [str(Path(__file__).parents[2] / "examples" / "digits.py"), "--epochs", "1", "--plain", "--threads", "1"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(folder: Path, *words: str) -> list[str]:
    """mpirun, for which any name is a host: what it would run there through ssh is run here, with that name."""
    reach = folder / "reach"
    reach.write_text('#!/bin/sh\nexport SHOAL_HOST_NAME="$1"\nshift\nexec sh -c "$*"\n')
    reach.chmod(0o755)
    # Unbound: each of the hosts, which are one, would begin with the same core.
    return ["mpirun", "--mca", "plm_rsh_agent", str(reach), "--oversubscribe", "--bind-to", "none", *words]


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a launcher that a test starts."""
    return {**os.environ, **AS_ROOT, "COLUMNS": "200", **more}


def train_by(
    launcher: Sequence[str], folder: Path, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`shoal train` with these words in every process that the launcher starts, in this folder."""
    return subprocess.run(
        [*launcher, *command("train", *(words or TASK), "--name", "met")],
        cwd=folder,
        env=dict(env or surroundings()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )


def start_all(
    launchers: Sequence[Sequence[str]],
    folder: Path,
    *,
    words: Sequence[Sequence[str]] = (),
    envs: Sequence[Mapping[str, str]] = (),
) -> list[str]:
    """`shoal train` under each of them at once, each perhaps with its own words or environment; all end well.
    What each has printed."""
    said = words or [TASK] * len(launchers)
    around = envs or [surroundings()] * len(launchers)
    started = [
        subprocess.Popen(
            [*launcher, *command("train", *own, "--name", "met")],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launcher, own, env in zip(launchers, said, around, strict=True)
    ]
    try:
        printed = [one.communicate(timeout=GUARD_S)[0] for one in started]
        assert [one.returncode for one in started] == [0] * len(started), printed
        return printed
    finally:
        for one in started:
            one.kill()
            one.wait()


def free_port() -> int:
    """One that nobody on loopback listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def results_in(folder: Path) -> dict[str, Any]:
    """What came out of the run that `train_by` started."""
    return RunFolder.open("met", folder / "runs").read_result()


def digest_here(folder: Path, workers: int, **settings: Any) -> str:
    """Of the same training on one host."""
    settings = {"target": f"{TASKS}:mlp", "args": {"steps": 6}, **settings}
    cluster = {"workers": workers, "threads": 1}
    return train(cluster=cluster, name="here", runs=folder / "runs", progress=False, **settings).digest


def digits_on_two_hosts(folder: Path) -> str:
    """What the example comes to with 2 workers, as if on 2 hosts."""
    cluster = {"workers": 2, "threads": 1, "on": "local:2"}
    runs = folder / "runs"
    return train(DIGITS[0], epochs=1, cluster=cluster, name="two", runs=runs, progress=False).digest


def left_in(folder: Path) -> list[str]:
    """What meetings have left there."""
    return [path.name for path in (folder / "runs").glob(".*")]


PYTHON = sys.executable
