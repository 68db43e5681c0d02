"""However samples are chosen and read: two workers and a served model train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, largest_difference
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess

TASKS = Path(__file__).with_name("sampled_tasks.py")


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


@pytest.mark.parametrize("sampler", ["weighted", "once", "stratified", "function", "object"])
def test_samplers_are_the_same_on_two_workers(train: Train, sampler: str) -> None:
    alone = train("sampled", sampler=sampler, slots=2)
    assert train("sampled", sampler=sampler, workers=2).digests() == alone.digests()


# Orders know nothing of servers: one of each kind, drawn and made by the user.
@pytest.mark.parametrize(
    "sampler",
    [
        "weighted",
        "object",
        *(pytest.param(more, marks=pytest.mark.long) for more in ("once", "stratified", "function")),
    ],
)
def test_samplers_are_the_same_with_servers(train: Train, sampler: str) -> None:
    alone = train("sampled", sampler=sampler, slots=2)
    served = train("sampled", sampler=sampler, workers=2, strategy="ps:servers=2")
    assert served.digests() == alone.digests()
    assert served.results["samples"] == alone.results["samples"] and served.results["audit"]["clean"]


def test_positions_of_an_epoch_are_counted_not_samples(train: Train) -> None:
    # 67 positions in an epoch: 24, 24 and 19 in a step.
    assert train("sampled", sampler="object").results["samples"] == 4 * 67 + 48
    # Drawn with replacement, each of the 201 positions counts once, whatever lies there.
    served = train("sampled", sampler="weighted", workers=2, strategy="ps:sync=asp")
    assert served.results["samples"] == 201 + 5 * 24 and served.results["audit"]["clean"]


def test_a_stream_is_the_same_everywhere(train: Train) -> None:
    alone = train("streamed", slots=2)
    for way in ({}, {"strategy": "ps:servers=2"}):
        assert train("streamed", workers=2, **way).digests() == alone.digests()


def test_a_shard_of_another_length_ends_the_run_with_its_name(train: Train) -> None:
    with pytest.raises(
        (WorkerFailed, ValueError), match="shard 20 was declared with 25 samples, but it yields only 20"
    ):
        train("misdeclared", workers=2)


def test_samples_of_different_shapes_count_by_their_tokens(train: Train) -> None:
    alone = train("sentences", slots=2)
    for way in ({}, {"strategy": "ps:servers=2"}):
        other = train("sentences", workers=2, **way)
        assert other.digests() == alone.digests()
        assert other.results["results"] == alone.results["results"]
    # Two slots pad differently than one, which changes nothing but the order of sums.
    whole, halves = train("sentences_without_dropout"), train("sentences_without_dropout", workers=2)
    assert largest_difference(whole.model, halves.model) < 1e-5


def test_a_fold_trains_on_the_rest_and_tests_on_it(train: Train) -> None:
    runs = [
        train("sampled", sampler="stratified", slots=2, overrides={"fold": f"{number}/3"}) for number in (1, 2)
    ]
    assert runs[0].digests() != runs[1].digests()
    both = train("sampled", sampler="stratified", workers=2, overrides={"fold": "2/3"})
    assert both.digests() == runs[1].digests()
    assert both.results["results"] == runs[1].results["results"]
