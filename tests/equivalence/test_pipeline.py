"""Stages on different workers train as one process does whose batches are cut into the same pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster

STEPS = 6
SAME_CUT = 1e-9
"""The bound in float64 against one process."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@pytest.fixture
def own(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    """Trains the tasks of pipelines alone."""
    return Train(Path(__file__).with_name("pipeline_tasks.py"), tmp_path, zygote)


def alone(train: Train, task: str, pieces: int, **args: object) -> Trained:
    overrides = {"accumulate": pieces, "evaluate_every": 3}
    return train(task, strategy="data", numerics="float64", overrides=overrides, **args)


def cut(train: Train, task: str, spec: str, pieces: int, workers: int = 2, **args: object) -> Trained:
    strategy = f"pipeline:{spec},microbatches={pieces}"
    return train(
        task, workers=workers, strategy=strategy, numerics="float64", overrides={"evaluate_every": 3}, **args
    )


def compare(ours: Trained, reference: Trained) -> None:
    assert largest_difference(ours.model, reference.model) <= SAME_CUT
    assert largest_difference(ours.state, reference.state) <= SAME_CUT
    assert ours.losses() == pytest.approx(reference.losses(), rel=SAME_CUT)
    assert len(ours.told("evaluation")) == len(reference.told("evaluation"))
    for mine, theirs in zip(ours.told("evaluation"), reference.told("evaluation"), strict=True):
        assert mine["results"] == pytest.approx(theirs["results"], rel=SAME_CUT)


@pytest.mark.parametrize(
    ("task", "schedule", "optimizer"),
    [
        ("mlp_quiet", "gpipe", "adamw"),
        ("gpt_quiet", "interleaved", "adamw"),
        ("gpt_quiet", "zero-bubble", "momentum"),
        ("conv", "1f1b", "momentum"),
    ],
)
def test_as_one_process(train: Train, task: str, schedule: str, optimizer: str) -> None:
    """Evaluated on the way; BatchNorm sees the same pieces in the same order, tied embeddings are one."""
    args = {"steps": STEPS, "optimizer": optimizer}
    compare(cut(train, task, f"schedule={schedule}", 4, **args), alone(train, task, 4, **args))


def test_a_small_last_batch_has_fewer_pieces(train: Train) -> None:
    """201 samples in batches of 24: the ninth has 9 samples, for 12 pieces."""
    args = {"steps": 11, "clip": 0.1}
    compare(
        cut(train, "mlp_quiet", "split=2+2+1+1,per_worker=2", 12, **args), alone(train, "mlp_quiet", 12, **args)
    )


def test_pieces_that_count_nothing(train: Train) -> None:
    """Token counts weigh; some pieces are padding alone."""
    compare(cut(train, "padded", "schedule=1f1b", 20, steps=STEPS), alone(train, "padded", 20, steps=STEPS))


def test_dropout_is_drawn_again_alike(train: Train) -> None:
    first, again = (
        train("mlp", workers=2, strategy="pipeline:split=3+3,schedule=" + schedule, steps=STEPS)
        for schedule in ("1f1b", "zero-bubble")
    )
    other = train("mlp_quiet", workers=2, strategy="pipeline:split=3+3", steps=STEPS)
    assert largest_difference(first.model, again.model) < 1e-5
    assert largest_difference(first.model, other.model) > 1e-3


def test_there_and_back_again(train: Train) -> None:
    """A checkpoint of a pipeline goes on in one process, and that one's in another pipeline."""
    unbroken = alone(train, "gpt_quiet", 2, steps=STEPS)
    saving = {"checkpoint": "every=2"}
    begun = cut(train, "gpt_quiet", "schedule=1f1b", 2, steps=STEPS, **saving)
    single = {"strategy": "data", "cluster": Cluster(workers=1, threads=1), "overrides": {"accumulate": 2}}
    middle = train.resume(begun, 2, **single)
    again = {
        "strategy": "pipeline:schedule=interleaved,microbatches=2",
        "cluster": begun.job.cluster,
        "overrides": {},
    }
    ended = train.resume(middle, 4, **again)
    assert largest_difference(ended.model, unbroken.model) <= SAME_CUT
    assert largest_difference(ended.state, unbroken.state) <= SAME_CUT


def test_an_objective_is_computed_where_the_output_is(own: Train) -> None:
    compare(
        cut(own, "with_objective", "schedule=zero-bubble", 4, steps=3), alone(own, "with_objective", 4, steps=3)
    )


def test_what_changes_in_place_across_a_cut(own: Train) -> None:
    reference = alone(own, "residual", 3, steps=3)
    for schedule in ("interleaved", "zero-bubble"):
        compare(cut(own, "residual", f"schedule={schedule}", 3, steps=3), reference)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("diverging", r"the loss is nan at step 1 \(slot 0\)"),
    ],
)
def test_what_goes_wrong_is_said_in_one_sentence(own: Train, task: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        own(task, workers=2, strategy="pipeline")


def test_each_worker_holds_its_stage_alone(own: Train, tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state, counted in each process when all are there. (The buffers of a
    group in shared memory are the host's, not a worker's.)"""
    held: dict[int, int] = {}
    for workers, strategy in ((1, "data"), (4, "pipeline:split=4+4+4+4,microbatches=4,via=backend")):
        folder = tmp_path / str(workers)
        folder.mkdir()
        own("weighed", workers=workers, strategy=strategy, folder=str(folder))
        weights = [int(path.read_text()) for path in folder.iterdir()]
        assert len(weights) == workers
        held[workers] = max(weights)
    assert held[4] < 0.4 * held[1], held


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet", "conv"])
@pytest.mark.parametrize("workers", [2, 4])
def test_all_of_it(train: Train, task: str, schedule: str, optimizer: str, workers: int) -> None:
    if workers == 4 and schedule == "interleaved" and task != "conv":
        pytest.skip("eight stages are more than these models have layers")
    args = {"steps": STEPS, "optimizer": optimizer}
    ours = cut(train, task, f"schedule={schedule}", 5, workers, **args)
    compare(ours, alone(train, task, 5, **args))
