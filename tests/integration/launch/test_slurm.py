"""`shoal train` and `shoal slurm` on a real Slurm of two nodes, which is started once for all tests here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import command
from helpers.launchers import DIGITS, TASK, digest_here, digits_on_two_hosts, left_in, results_in, train_by
from helpers.slurm import TwoNodes, why_not
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a Slurm")
GUARD_S = 120.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> Iterator[TwoNodes]:
    with TwoNodes(tmp_path_factory.mktemp("slurm") / "daemons", {ZYGOTE_VARIABLE: zygote.name}) as nodes:
        yield nodes


def test_tasks_of_a_step_are_one_run(slurm: TwoNodes, tmp_path: Path) -> None:
    done = train_by(["srun", "--nodes=2", "--ntasks-per-node=1"], tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found: 2 workers on 2 hosts by Slurm job ") == 1
    assert "2 workers on 2 hosts (n1, n2), 1 thread each, encrypted between them" in done.stdout
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2)
    assert left_in(tmp_path) == []


@pytest.mark.long
def test_the_example_has_the_bits_of_two_hosts_here(slurm: TwoNodes, tmp_path: Path) -> None:
    done = train_by(["srun", "--nodes=2", "--ntasks-per-node=1"], tmp_path, *DIGITS, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results_in(tmp_path)["digest"] == digits_on_two_hosts(tmp_path)


@pytest.mark.long
def test_the_hosts_of_an_allocation_are_used(slurm: TwoNodes, tmp_path: Path) -> None:
    done = train_by(["salloc", "--quiet", "--nodes=2"], tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found: 2 hosts by Slurm job " in done.stdout
    assert "2 workers on 2 hosts (n1, n2)" in done.stdout
    assert results_in(tmp_path)["digest"] == digest_here(tmp_path, workers=2)


@pytest.mark.long
def test_a_job_that_is_put_back_into_the_queue_goes_on(slurm: TwoNodes, tmp_path: Path) -> None:
    """Its bits are those of a run that nobody has interrupted."""
    task = [TASK[0], "--arg", "steps=400", "--threads", "1", "--checkpoint", "every=20"]
    words = command("slurm", *task, "--nodes", "2", "--name", "met")
    done = subprocess.run(words, cwd=tmp_path, env=slurm.env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0 and done.stdout.startswith("submitted: Slurm job "), done.stderr
    job = done.stdout.split("job ")[1].split(";")[0]
    output = tmp_path / f"small-tasks-slurm-{job}.out"
    run = tmp_path / "runs" / "met"
    slurm.wait_for(lambda: list(run.glob("checkpoints/step-*")) != [], "a checkpoint", GUARD_S)
    slurm.ask("scontrol", "requeue", job)
    slurm.wait_for(lambda: slurm.state_of(job) == "COMPLETED", "the end of the job", GUARD_S)
    assert "resuming met after step" in output.read_text()
    results = results_in(tmp_path)
    assert results["steps"] == 400 and results["audit"]["clean"]
    assert results["digest"] == digest_here(tmp_path, workers=2, args={"steps": 400})


@pytest.mark.long
def test_a_job_that_slurm_refuses(slurm: TwoNodes, tmp_path: Path) -> None:
    words = command("slurm", "digits.py", "--nodes", "3", "--partition", "nowhere")
    done = subprocess.run(words, cwd=tmp_path, env=slurm.env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 1
    assert "error: sbatch refused the job: " in done.stderr and "partition" in done.stderr
