"""Parts of a batch that are learnt already are not learnt from again, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess

STEPS = 60
ENOUGH = 0.9
"""Reached by some parts of a batch earlier than by others."""


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def skipped(run: Trained) -> tuple[int, float]:
    """Parts, and the samples in them."""
    told = [values["skipped"] for values in run.told("steps") if "skipped" in values]
    return sum(parts for parts, _ in told), sum(samples for _, samples in told)


def test_the_same_parts_are_skipped_on_any_number_of_processes(train: Train) -> None:
    alone = train("everything", slots=4, steps=STEPS, skip=ENOUGH)
    parts, samples = skipped(alone)
    assert 20 < parts < 4 * STEPS - 20 and 4 * parts <= samples <= 6 * parts
    for workers in (2, 4):
        other = train("everything", workers=workers, slots=4, steps=STEPS, skip=ENOUGH)
        assert other.digests() == alone.digests()
        assert other.losses() == alone.losses()
        assert skipped(other) == (parts, samples)
    assert alone.digests() != train("everything", slots=4, steps=STEPS).digests()


def test_the_plain_loop_skips_the_same(train: Train) -> None:
    loop = train("everything", strategy="data", steps=STEPS, skip=ENOUGH, clip=0.0)
    arena = train("everything", strategy="data:via=arena", steps=STEPS, skip=ENOUGH, clip=0.0)
    assert 3 < skipped(loop)[0] < STEPS
    assert loop.digests() == arena.digests() and skipped(loop) == skipped(arena)


@pytest.mark.parametrize("via", ["ring", "backend"])
def test_over_sockets_too(train: Train, via: str) -> None:
    arena = train("everything", workers=2, steps=12, skip=1.0)
    other = train("everything", workers=2, steps=12, skip=1.0, strategy=f"data:via={via}")
    assert skipped(other) == skipped(arena) and skipped(other)[0]
    assert largest_difference(other.model, arena.model) < 1e-3


@pytest.mark.parametrize("strategy", ["data", "data:via=arena", "data:via=ring"])
def test_a_batch_that_is_skipped_whole_leaves_no_trace(train: Train, strategy: str) -> None:
    """Neither in parameters nor in moving buffers nor in the optimizer; only the loss is told."""
    workers = 1 if strategy == "data" else 2
    run = train("everything", workers=workers, strategy=strategy, steps=5, skip=1e9)
    again = train("everything", workers=workers, strategy=strategy, steps=1, skip=1e9)
    assert run.digests() == again.digests() and run.state == {}
    assert run.model["1.running_mean"].eq(0).all() and run.model["1.num_batches_tracked"] == 0
    assert skipped(run) == (5 * workers, 5 * 24)
    assert all(1 < loss < 3 for loss in run.losses().values())


def test_what_is_skipped_counts_in_the_audit_as_done(train: Train) -> None:
    run = train("everything", workers=2, steps=STEPS, skip=ENOUGH)
    assert run.results["audit"]["clean"] and run.results["audit"]["never"] == 0


def test_skipping_goes_on_after_a_resume(train: Train) -> None:
    saved = train("everything", workers=2, steps=STEPS, skip=ENOUGH, checkpoint="every=25")
    resumed = train.resume(saved, 50)
    assert resumed.digests() == saved.digests()
    assert skipped(resumed)[0] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"strategy": "ps"}, r"skip_loss_below .* but strategy=ps cannot; use data"),
        ({"strategy": "data:batchnorm=sync", "workers": 2}, "batchnorm=sync needs them all"),
        ({"optimizer": "LBFGS"}, "LBFGS evaluates several times"),
    ],
)
def test_what_cannot_skip_says_so(train: Train, args: dict, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        train("everything", steps=2, skip=ENOUGH, **args)
