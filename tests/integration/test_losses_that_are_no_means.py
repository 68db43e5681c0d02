"""A run whose loss is no mean over samples says so once, at its first step; its bits are as they would be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training import Train
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parent / "mean_tasks.py"


@pytest.fixture
def train(tmp_path, zygote):
    return Train(TASKS, tmp_path, zygote)


def warnings(trained):
    return [told["text"] for told in trained.told("warning") if "no mean over samples" in told["text"]]


@pytest.mark.parametrize(
    ("factory", "strategy", "args"),
    [
        ("tokens", "data", {}),
        ("tokens", "ps:servers=2", {"objective": True}),
        ("classes", "data:via=ring", {}),
        ("negatives", "ps:sync=asp", {}),
        ("tokens", "sharded", {}),
    ],
)
def test_what_is_no_mean_is_told_once(train, factory, strategy, args):
    (text,) = warnings(train(factory, workers=2, strategy=strategy, **args))
    assert "so 2 parts of a batch" in text and "weight=" in text and "shoal verify" in text


@pytest.mark.parametrize(
    ("factory", "strategy", "precision"),
    [
        ("tokens", "data", "bf16"),
        ("tokens", "ps:sync=asp", "fp32"),
        ("classes", "data", "fp32"),
        ("tokens", "sharded", "fp32"),
        ("tokens", "pipeline:microbatches=2", "fp32"),
    ],
)
def test_what_is_counted_by_its_weight_is_not(train, factory, strategy, precision):
    assert not warnings(train(factory, workers=2, strategy=strategy, precision=precision, counted=True))


def test_one_part_is_no_matter(train):
    assert not warnings(train("negatives"))
    assert len(warnings(train("negatives", overrides={"accumulate": 2}))) == 1


@pytest.mark.parametrize("strategy", ["data", "ps:servers=2", "sharded"])
def test_not_a_bit_of_the_run_changes(train, strategy):
    """Quiet runs, which are there to be measured, leave the look out."""
    job = Job(target=f"{TASKS}:tokens", strategy=strategy, cluster=Cluster(workers=2, threads=1))
    looked, quiet = (train.run(replace(job, options={"quiet": each})) for each in (False, True))
    assert warnings(looked) and not warnings(quiet)
    assert looked.digests() == quiet.digests()
