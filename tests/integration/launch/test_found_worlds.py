"""`shoal train` in processes that somebody else has started: all of them are one run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import command
from helpers.launchers import (
    DIGITS,
    PYTHON,
    TASK,
    digest_here,
    digits_on_two_hosts,
    free_port,
    left_in,
    mpirun,
    results_in,
    start_all,
    surroundings,
    train_by,
)
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess

needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (openmpi-bin)")


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents take it from their environment: so tests need not load torch for each."""
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


@needs_mpi
def test_ranks_of_mpirun_are_one_run(tmp_path: Path) -> None:
    done = train_by(mpirun(tmp_path, "--host", "n1:2,n2:1", "-np", "3"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found: 3 workers on 2 hosts by MPI; --on local trains") == 1
    assert done.stdout.count("3 workers on 2 hosts (n1, n2), 1 thread each, encrypted between them") == 2
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=3)
    assert left_in(tmp_path) == []


@needs_mpi
@pytest.mark.long
def test_ranks_of_one_host_are_a_run_of_that_host(tmp_path: Path) -> None:
    done = train_by(mpirun(tmp_path, "-np", "2"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found: 2 workers on 1 host by MPI" in done.stdout and "loopback only" in done.stdout
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2)


@needs_mpi
@pytest.mark.long
def test_all_ranks_end_with_the_status_of_the_run(tmp_path: Path) -> None:
    """What the first says is said once; mpirun would end the others, but is told not to."""
    launcher = mpirun(tmp_path, "--host", "n1:1,n2:1", "-np", "2", "sh", "-c")
    script = '"$@"; echo "$OMPI_COMM_WORLD_RANK ends with $?"'
    done = train_by([*launcher, script, "sh"], tmp_path, "nowhere.py")
    assert "0 ends with 2" in done.stdout and "1 ends with 2" in done.stdout
    assert done.stderr.count("error: ") == 1
    assert left_in(tmp_path) == []


@needs_mpi
@pytest.mark.long
def test_agents_that_mpirun_starts(tmp_path: Path) -> None:
    env = surroundings(SHOAL_MPIRUN=" ".join(mpirun(tmp_path)))
    done = train_by([], tmp_path, *TASK, "-w", "2", "--on", "mpi:n1,n2", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers on 2 hosts (n1, n2)" in done.stdout
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2)


@needs_mpi
@pytest.mark.long
def test_a_host_that_mpirun_does_not_reach_is_named(tmp_path: Path) -> None:
    env = surroundings(SHOAL_MPIRUN="mpirun --mca plm_rsh_agent /bin/false")
    done = train_by([], tmp_path, *TASK, "--on", "mpi:n1", env=env)
    assert done.returncode == 1
    assert "error: Host n1 could not join: " in done.stderr


def torchruns(endpoint: int, *words: str) -> list[list[str]]:
    """Two of them, as on two hosts."""
    launcher = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(endpoint), *words]
    return [[*launcher, "--node-rank", str(rank), "--no-python"] for rank in range(2)]


@pytest.mark.long  # `test_torchrun.py` has a script under torchrun, and unit tests what is found there
def test_nodes_of_torchrun_are_one_run(tmp_path: Path) -> None:
    first, second = start_all(torchruns(free_port()), tmp_path)
    assert "found: 2 workers on 2 hosts by torchrun" in first, first
    assert f"2 workers on 2 hosts ({socket.gethostname()}-0, {socket.gethostname()}-1)" in first
    assert "found" not in second and "step" not in second
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2)
    assert left_in(tmp_path) == []


def tf_config(kind: str, index: int) -> dict[str, str]:
    cluster = {"chief": ["127.0.0.2:2222"], "worker": ["127.0.0.3:2222"], "ps": ["127.0.0.3:2223"]}
    return surroundings(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}))


def test_tasks_of_tf_config_are_one_run(tmp_path: Path) -> None:
    tasks = [("chief", 0), ("worker", 0), ("ps", 0), ("evaluator", 0)]
    first, *others = start_all([[]] * 4, tmp_path, envs=[tf_config(*task) for task in tasks])
    assert "found: 2 workers and 1 server on 2 hosts by TF_CONFIG" in first, first
    assert "2 workers, 1 server and a coordinator on 2 hosts (127.0.0.2, 127.0.0.3)" in first
    assert others[:2] == ["", ""]
    assert "this process waits for the end of the run" in others[2]
    results = results_in(tmp_path)
    assert results["digest"] == digest_here(tmp_path, workers=2, strategy="ps:servers=1,wire=tcp")
    assert results["audit"]["clean"] and left_in(tmp_path) == []


@needs_mpi
@pytest.mark.long
def test_the_example_has_the_bits_of_two_hosts_here(tmp_path: Path) -> None:
    """Under each launcher; Slurm has a file of its own."""
    cluster = {"worker": ["127.0.0.2:1", "127.0.0.3:1"]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(2)]
    ways: dict[str, dict[str, Any]] = {
        "mpi": {"launchers": [mpirun(tmp_path, "--host", "n1:1,n2:1", "-np", "2")]},
        "torchrun": {"launchers": torchruns(free_port())},
        "tf_config": {"launchers": [[], []], "envs": [surroundings(TF_CONFIG=json.dumps(one)) for one in tasks]},
    }
    digests = {}
    for name, way in ways.items():
        (tmp_path / name).mkdir()
        start_all(folder=tmp_path / name, words=[DIGITS] * len(way["launchers"]), **way)
        digests[name] = results_in(tmp_path / name)["digest"]
    assert digests == dict.fromkeys(ways, digits_on_two_hosts(tmp_path))


@pytest.mark.long
def test_flags_of_classic_tensorflow(tmp_path: Path) -> None:
    flags = ["--ps_hosts=127.0.0.2:1,127.0.0.3:1", "--worker_hosts=127.0.0.2:2,127.0.0.3:2"]
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    words = [[*TASK, *flags, f"--job_name={kind}", f"--task_index={index}"] for kind, index in tasks]
    first, *others = start_all([[]] * 4, tmp_path, words=words)
    assert "found: 2 workers and 2 servers on 2 hosts by --worker_hosts and --ps_hosts" in first, first
    assert others == [""] * 3
    strategy = "ps:servers=2,wire=tcp"
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2, strategy=strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "env", "status", "sentence"),
    [
        (["--on", "mpi"], {"SHOAL_MPIRUN": "/nowhere/mpirun"}, 1, "error: /nowhere/mpirun cannot be run (No such"),
        (["--on", "slurm"], {}, 1, "error: on=slurm uses the hosts of an allocation, but there is none here"),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},
            1,
            "error: 2 of 3 processes by MPI (rank 1, 2) did not come to",
        ),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
            1,
            "error: The first of 3 processes by MPI was not heard in",
        ),
        (["--on", "local"], {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 0, ""),
    ],
)
def test_what_cannot_be_is_said_soon(
    words: list[str], env: dict[str, str], status: int, sentence: str, tmp_path: Path
) -> None:
    done = train_by([], tmp_path, *TASK, *words, env=surroundings(**env))
    assert done.returncode == status, done.stderr
    assert sentence in done.stderr and done.stderr.count("\n") == int(bool(sentence))
    assert left_in(tmp_path) == []


@pytest.mark.long
def test_without_sbatch(tmp_path: Path) -> None:
    env = surroundings(PATH=str(tmp_path))
    words = command("slurm", "digits.py", "--nodes", "2")
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: sbatch is not installed on this host; submit from a host of the cluster")


@pytest.mark.long
def test_all_end_when_the_first_is_killed(tmp_path: Path) -> None:
    """Nobody else starts or ends these: an agent's lease, or the silence in the folder, does it."""
    flags = ["--worker_hosts=127.0.0.2:1,127.0.0.3:1,127.0.0.3:2", "--job_name=worker"]
    words = command("train", TASK[0], "--arg", "steps=1000000", "--plain", "--threads", "1", *flags)
    started = [
        subprocess.Popen(
            [*words, f"--task_index={index}", "--name", "met"],
            cwd=tmp_path,
            env=surroundings(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    first, *others = started
    try:
        assert first.stdout is not None
        assert any(line.startswith("step ") for line in first.stdout)
        first.kill()
        for one in others:
            _, errors = one.communicate(timeout=150)
            assert one.returncode == 1 and "error: The first of 3 processes by --worker_hosts" in errors
    finally:
        for one in started:
            one.kill()
            one.communicate()
    assert left_in(tmp_path) == []


@needs_mpi
@pytest.mark.long
def test_mpirun_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    words = [TASK[0], "--arg", "steps=1000000", "--plain", "--threads", "1", "--name", "met"]
    launcher = mpirun(tmp_path, "--host", "n1:2,n2:1", "-np", "3")
    started = subprocess.Popen(
        [*launcher, *command("train", *words)], cwd=tmp_path, env=surroundings(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        assert any(line.startswith("step ") for line in started.stdout)
        started.terminate()
        started.communicate(timeout=60)
    finally:
        started.kill()
        started.communicate()
    deadline = time.monotonic() + 60
    while left := [one.pid for one in psutil.process_iter() if is_in(one, tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process works in this folder."""
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
