"""Where every worker holds a part of the model, the death of one ends the run, which can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from remains import processes_in

from helpers.training import Train
from shoal.errors import LaunchError
from shoal.launch import ZygoteProcess
from shoal.launch.resuming import find_whole, resumed_job
from shoal.spec import Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("pipeline", marks=pytest.mark.long)])
def test_a_killed_worker_ends_the_run_and_nothing_is_left(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str
) -> None:
    train = Train(TASKS, tmp_path, zygote)
    with pytest.raises(LaunchError, match=r"Worker 1 was killed .* go on from the last checkpoint with --resume"):
        train(
            "mlp_quiet",
            workers=2,
            strategy=strategy,
            checkpoint="every=3",
            chaos="kill worker:1 at step 8",
            steps=12,
        )
    (folder,) = train.runs
    assert not processes_in(folder)

    path, manifest = find_whole(str(folder), tmp_path, print)
    assert manifest.step in (3, 6)
    resumed = train.run(
        resumed_job(Job.from_json((folder / "job.json").read_text()), path, manifest, {"chaos": ""})
    )
    assert resumed.results["steps"] == 12 and resumed.results["audit"]["clean"]
    assert resumed.losses().keys() == set(range(manifest.step + 1, 13))


def test_it_says_how_it_could_have_been_resumed(tmp_path: Path, zygote: ZygoteProcess) -> None:
    train = Train(TASKS, tmp_path, zygote)
    with pytest.raises(LaunchError, match="train with --checkpoint to be able to go on with --resume"):
        train("mlp", workers=2, strategy="mesh:data=2", chaos="kill worker:0 at step 3")


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("step", [2, 6, 10])
def test_a_worker_killed_in_any_turn_of_layers_can_be_resumed_with_the_same_bits(
    tmp_path: Path, zygote: ZygoteProcess, step: int, worker: int
) -> None:
    train = Train(TASKS, tmp_path, zygote)
    task = {"workers": 2, "strategy": "layer:phases=3,every=4", "checkpoint": "every=1", "steps": 12}
    with pytest.raises(LaunchError, match=rf"Worker {worker} was killed .* nobody can take its place; go on from"):
        train("mlp_quiet", chaos=f"kill worker:{worker} at step {step}", **task)
    (folder,) = train.runs
    assert not processes_in(folder)
    path, manifest = find_whole(str(folder), tmp_path, print)
    assert 0 < manifest.step <= step
    job = resumed_job(Job.from_json((folder / "job.json").read_text()), path, manifest, {"chaos": ""})
    assert train.run(job).digests() == train("mlp_quiet", **task).digests()
