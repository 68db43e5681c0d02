"""`shoal train` in processes that somebody else has started: all of them are one run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.launchers import TASK, digest_here, left_in, mpirun, results_in, surroundings, train_by
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
