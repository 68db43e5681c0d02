"""A run whose loss is no mean over samples says so once, at its first step; its bits are as they would be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training import Train, largest_difference
from shoal.spec import Cluster, Job
from shoal.verification import Verdict, verify

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
        pytest.param("tokens", "ps:servers=2", {"objective": True}, marks=pytest.mark.long),
        ("classes", "data:via=ring", {}),
        ("negatives", "ps:sync=ssp:1", {}),  # under asp who looks may come too late to have a batch
        ("tokens", "sharded", {}),
    ],
)
def test_what_is_no_mean_is_told_once(train, factory, strategy, args):
    (text,) = warnings(train(factory, workers=2, strategy=strategy, **args))
    assert "so 2 parts of a batch" in text and "weight=" in text and "shoal verify" in text
    assert factory != "tokens" or "set weight=lambda batch: float((batch[1] != -100).sum())" in text


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


@pytest.mark.parametrize("strategy", ["data", "ps:servers=1", "pipeline:microbatches=2"])
def test_the_weight_of_a_loss_that_is_known_is_derived(train, strategy):
    """It is said once, and two parts train what one process does."""
    alone, trained = train("known"), train("known", workers=2, strategy=strategy)
    for run in (alone, trained):
        assert not warnings(run)
        (line,) = [told["text"] for told in run.told("line") if told["text"].startswith("weight= follows")]
        assert line.endswith("a batch counts the class weights of its targets")
    assert largest_difference(trained.model, alone.model) < 1e-5
    assert trained.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert trained.results["results"] == pytest.approx(alone.results["results"], rel=1e-5)


def test_verify_says_why_and_what_to_set(zygote):
    report = verify(f"{TASKS}:tokens", workers=2, steps=2, zygote=zygote)
    (row,) = [row for row in report.rows if row.comparison == "a batch and its halves"]
    assert (
        row.verdict is Verdict.WARNING and "set weight=lambda batch: float((batch[1] != -100).sum())" in row.note
    )
    assert not report.ok, "the whole batch in float64 is another loss"
    counted = verify(f"{TASKS}:tokens", workers=2, steps=2, args={"counted": True}, zygote=zygote)
    assert counted.ok and all(row.comparison != "a batch and its halves" for row in counted.rows)


def test_one_part_is_no_matter(train):
    assert not warnings(train("negatives"))
    assert len(warnings(train("negatives", overrides={"accumulate": 2}))) == 1


@pytest.mark.parametrize(
    "strategy", ["data", *(pytest.param(more, marks=pytest.mark.long) for more in ("ps:servers=2", "sharded"))]
)
def test_not_a_bit_of_the_run_changes(train, strategy):
    """Quiet runs, which are there to be measured, leave the look out."""
    job = Job(target=f"{TASKS}:tokens", strategy=strategy, cluster=Cluster(workers=2, threads=1))
    looked, quiet = (train.run(replace(job, options={"quiet": each})) for each in (False, True))
    assert warnings(looked) and not warnings(quiet)
    assert looked.digests() == quiet.digests()
